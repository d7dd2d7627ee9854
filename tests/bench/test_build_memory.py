from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gguf import GGMLQuantizationType

from bench.build_memory import SPEC, type_of, write_model
from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.model.family import tensor_shapes

SMALL = replace(
    SPEC,
    name="small",
    vocab_size=300,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)


def test_the_model_is_one_that_is_built(tmp_path: Path) -> None:
    write_model(tmp_path / "small.gguf", SMALL)
    source = GgufSource(tmp_path / "small.gguf")
    assert replace(source.spec, rms_norm_eps=SMALL.rms_norm_eps) == SMALL  # f32 in the file
    for name, shape in tensor_shapes(SMALL).items():
        assert source.tensor(name).shape == shape
    assert source.tokenizer_files().generation["eos_token_id"] == [0]


def test_types_are_mixed_as_in_files_that_people_have() -> None:
    types = [type_of(name, SPEC) for name in tensor_shapes(SPEC)]
    sixes = types.count(GGMLQuantizationType.Q6_K)
    assert sixes == SPEC.num_hidden_layers + 1
    assert types.count(GGMLQuantizationType.Q4_K) == 7 * SPEC.num_hidden_layers + 2 - sixes
