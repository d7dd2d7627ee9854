"""Files of the shapes that Unsloth, bartowski, ggml-org and LM Studio publish, which are read as they are.

Each is small, and written by the `gguf` package.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, TokenType, quants
from tokenizers import Tokenizer

from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.builder.sources.gguf_rope import rope_factors
from shortfin_apps.llm.model.rope import Llama3Scaling
from shortfin_apps.llm.model.spec import tensor_shapes
from shortfin_apps.llm.model.weight_blocks import BlockType
from tests.builder.gguf_data import write_random_gguf
from tests.builder.gguf_edits import edited, family, tiny, tokens_of, with_bytes, with_tokens
from tests.builder.golden_families import GoldenFamily
from tests.builder.model_files import SPEC, write_gguf
from tests.builder.specs import rope_of, windows_of

UNSLOTH = {
    "general.type": "model",
    "general.basename": "Qwen3",
    "general.quantized_by": "Unsloth",
    "general.size_label": "0.6B",
    "general.license": "apache-2.0",
    "general.repo_url": "https://huggingface.co/unsloth",
    "general.base_model.count": 1,
    "general.base_model.0.name": "Qwen3 0.6B",
    "general.tags": ["unsloth", "text-generation"],
    "general.languages": ["en"],
    "general.quantization_version": 2,
    "general.file_type": 15,
    "quantize.imatrix.file": "imatrix_unsloth.gguf",
    "quantize.imatrix.dataset": "calibration.txt",
    "quantize.imatrix.entries_count": 196,
    "quantize.imatrix.chunks_count": 685,
}
INFILL = {f"tokenizer.ggml.{name}_token_id": 3 for name in ("fim_pre", "fim_suf", "prefix", "suffix", "eot")}


def original_of(folder: Path) -> Path:
    """The file that `tiny` changes."""
    (folder / "original").mkdir()
    return write_gguf(folder / "original" / "tiny.gguf")


def is_same(source: GgufSource, original: Path) -> None:
    """Check the model's spec, its tensors and its tokenizer."""
    expected = GgufSource(original)
    assert source.spec == expected.spec
    assert source.tokenizer_files() == expected.tokenizer_files()
    for name in tensor_shapes(expected.spec):
        np.testing.assert_array_equal(source.tensor(name), expected.tensor(name), err_msg=name)


SAME: dict[str, Callable[[Path], Path]] = {
    "general and imatrix keys": lambda folder: tiny(folder, keys=UNSLOTH),
    "keys of infilling": lambda folder: tiny(folder, keys=INFILL, without=["tokenizer.ggml.eot_token_id"]),
    "alignment of 64": lambda folder: tiny(folder, alignment=64),
    "alignment of 8": lambda folder: tiny(folder, alignment=8),
    "version 2": lambda folder: with_bytes(tiny(folder), 4, struct.pack("<I", 2)),
    "head counts of each layer": lambda folder: tiny(
        folder,
        keys={
            "llama.attention.head_count": [SPEC.attention.heads] * len(SPEC.layers),
            "llama.attention.head_count_kv": [SPEC.attention.kv_heads] * len(SPEC.layers),
            "llama.feed_forward_length": [128] * len(SPEC.layers),
        },
    ),
    "no sliding window": lambda folder: tiny(folder, keys={"llama.attention.sliding_window": 0}),
    "scalars that change nothing": lambda folder: tiny(
        folder,
        keys={
            "llama.vocab_size": 300,
            "llama.attention.layer_norm_epsilon": 1e-5,
            "llama.expert_count": 0,
            "llama.rope.scaling.factor": 1.0,
        },
    ),
}


@pytest.mark.parametrize("shape", SAME)
def test_what_changes_nothing_is_read_over(tmp_path: Path, shape: str) -> None:
    is_same(GgufSource(SAME[shape](tmp_path)), original_of(tmp_path))


def test_norms_may_be_of_bf16_and_f16(tmp_path: Path) -> None:
    norm = np.linspace(0.5, 2, SPEC.hidden_size, dtype=np.float32)
    bf16, f16 = quants.quantize(norm, Type.BF16), norm.astype(np.float16)
    stored = {"output_norm.weight": (bf16, Type.BF16), "blk.0.attn_norm.weight": f16}
    source = GgufSource(tiny(tmp_path, tensors=stored))
    np.testing.assert_array_equal(source.tensor("output_norm.weight"), quants.dequantize(bf16, Type.BF16))
    np.testing.assert_array_equal(source.tensor("blk.0.attn_norm.weight"), f16)


@pytest.mark.parametrize("embedding", ["Q8_0", "Q6_K", "F16"])
@pytest.mark.parametrize("kind", ["Q4_K", "MXFP4"])
def test_embedding_and_head_may_have_other_types_than_the_rest(
    tmp_path: Path, embedding: str, kind: str
) -> None:
    otherwise = {"token_embd.weight": Type[embedding], "output.weight": Type[embedding]}
    path = write_random_gguf(tmp_path / "a.gguf", Type[kind], {} if embedding == "F16" else otherwise)
    if embedding == "F16":
        embd = np.ones(tensor_shapes(GgufSource(path).spec)["token_embd.weight"], np.float16)
        path = edited(path, tensors={"token_embd.weight": embd})
    source = GgufSource(path)
    assert (
        source.block_type("token_embd.weight")
        == {
            "Q8_0": BlockType(8),
            "Q6_K": BlockType(8, 16, group=256),
            "F16": None,
        }[embedding]
    )
    blocks = source.blocks("blk.0.ffn_down.weight")
    assert blocks is not None
    assert blocks.type == source.block_type("blk.0.ffn_down.weight")


def test_a_file_without_a_head_is_tied(tmp_path: Path) -> None:
    assert GgufSource(tiny(tmp_path, without=["output.weight"])).spec.tie_word_embeddings
    assert not GgufSource(tiny(tmp_path)).spec.tie_word_embeddings


def test_factors_of_llama_3_are_read(tmp_path: Path) -> None:
    scaling = Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    factors = rope_factors(scaling, SPEC.attention.head_dim, 500000.0).astype(np.float32)
    path = tiny(tmp_path, keys={"llama.rope.freq_base": 500000.0}, tensors={"rope_freqs.weight": factors})
    assert rope_of(GgufSource(path).spec).scaling == scaling


def test_heads_have_the_size_of_the_key(tmp_path: Path) -> None:
    """As in Qwen3 0.6B: not `embedding_length` divided by the heads."""
    spec = GgufSource(family("qwen3", tmp_path)).spec
    config = GoldenFamily.of("qwen3").config
    assert spec.attention.head_dim == config["head_dim"]
    assert spec.attention.head_dim * spec.attention.heads != spec.hidden_size


def test_windows_may_be_listed(tmp_path: Path) -> None:
    pattern = [True, False, False, True, True, False, True]
    spec = GgufSource(family("gemma3", tmp_path, {"attention.sliding_window_pattern": pattern})).spec
    window = max(filter(None, windows_of(spec)))
    assert windows_of(spec) == [window if each else None for each in pattern]


def test_the_first_files_of_gemma_2_have_its_window_and_caps(tmp_path: Path) -> None:
    missing = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    path = family("gemma2", tmp_path, without=[f"gemma2.{key}" for key in missing])
    spec = GgufSource(path).spec
    assert windows_of(spec)[:2] == [4096, None]
    assert spec.attention.cap == 50.0
    assert spec.logit_cap == 30.0


def test_phi_4_has_a_window_of_0_for_none(tmp_path: Path) -> None:
    spec = GgufSource(family("phi3", tmp_path, {"attention.sliding_window": 0})).spec
    assert not any(windows_of(spec))


def test_layers_of_a_draft_model_are_left_out(tmp_path: Path) -> None:
    """The last block, with tensors `nextn`, if it has its own embedding."""
    path = GoldenFamily.of("qwen35").write_gguf(tmp_path / "model.gguf")
    base = GgufSource(path).spec
    count = len(base.layers)
    shapes = {"nextn.eh_proj.weight": (48, 96), "nextn.embed_tokens.weight": (83, 48)}
    draft = {f"blk.{count}.{name}": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    keys = {"qwen35.block_count": count + 1, "qwen35.nextn_predict_layers": 1}
    assert GgufSource(edited(path, keys, draft, architecture="qwen35")).spec == base


def tokenizer_of(path: Path) -> tuple[Tokenizer, dict[str, Any], dict[str, Any]]:
    """The tokenizer, its configuration and the generation's."""
    files = GgufSource(path).tokenizer_files()
    return Tokenizer.from_str(files.tokenizer), files.config, files.generation


def test_padding_tokens_are_no_text(tmp_path: Path) -> None:
    padding = {f"[PAD{n}]": TokenType.UNUSED for n in range(3)}
    path = with_tokens(tmp_path, padding)
    tokenizer, _, _ = tokenizer_of(path)
    assert GgufSource(path).spec.vocab_size == tokenizer.get_vocab_size() + 3
    ids = tokenizer.encode("[PAD0]").ids
    assert tokenizer.token_to_id("[PAD0]") not in ids
    assert tokenizer.decode(ids) == "[PAD0]"


def test_added_tokens_are_found_by_their_types(tmp_path: Path) -> None:
    added = {"<think>": TokenType.USER_DEFINED, "<|vision|>": TokenType.CONTROL}
    tokenizer, _, _ = tokenizer_of(with_tokens(tmp_path, added))
    ids = tokenizer.encode("a<think>b<|vision|>").ids
    assert [tokenizer.id_to_token(each) for each in ids] == ["a", "<think>", "b", "<|vision|>"]
    assert tokenizer.decode(ids) == "a<think>b"


@pytest.mark.parametrize(
    ("added", "keys"),
    [
        (["<|eot_id|>", "<|eom_id|>"], []),
        (["[A]", "[B]"], ["ggml.eot_token_id", "ggml.eom_token_id"]),
        (["</s>", "<eos>"], []),
    ],
)
def test_several_tokens_end_an_answer(tmp_path: Path, added: list[str], keys: list[str]) -> None:
    count = len(tokens_of(write_gguf(tmp_path / "count.gguf"))["tokens"])
    ids = {name: count + index for index, name in enumerate(keys)}
    path = with_tokens(tmp_path, dict.fromkeys(added, TokenType.CONTROL), **ids)
    tokenizer, _, generation = tokenizer_of(path)
    found = {tokenizer.id_to_token(each) for each in generation["eos_token_id"]}
    assert found == {"<|im_end|>", "<|endoftext|>", *added}


def test_a_tag_of_html_ends_no_answer(tmp_path: Path) -> None:
    """Gemma's vocabulary has one for text that is struck through."""
    tokenizer, _, generation = tokenizer_of(with_tokens(tmp_path, {"</s>": TokenType.USER_DEFINED}))
    assert tokenizer.token_to_id("</s>") not in generation["eos_token_id"]


def test_ends_are_found_without_their_keys(tmp_path: Path) -> None:
    path = tiny(tmp_path, without=["tokenizer.ggml.eos_token_id"])
    _, config, generation = tokenizer_of(path)
    assert "eos_token" not in config
    expected = tokenizer_of(original_of(tmp_path))[2]["eos_token_id"]
    assert sorted(generation["eos_token_id"]) == sorted(expected)


@pytest.mark.parametrize("default", ["{{ plain }}", None])
def test_chat_templates_have_names(tmp_path: Path, default: str | None) -> None:
    """With the list of their names, as converters write it, with and without a default."""
    keys = {
        "tokenizer.chat_template.tool_use": "{{ tools }}",
        "tokenizer.chat_templates": ["tool_use"],
        **({} if default is None else {"tokenizer.chat_template": default}),
    }
    dropped = ["tokenizer.chat_template"] if default is None else []
    _, config, _ = tokenizer_of(tiny(tmp_path, keys=keys, without=dropped))
    named = {each["name"]: each["template"] for each in config["chat_template"]}
    assert named == {"tool_use": "{{ tools }}"} | ({} if default is None else {"default": default})


def test_the_advised_sampling_is_read(tmp_path: Path) -> None:
    keys = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.min_p": 0.0}
    generation = tokenizer_of(tiny(tmp_path, keys=keys))[2]
    assert (generation["temperature"], generation["top_k"], generation["min_p"]) == (0.6, 20, 0.0)


def test_a_first_part_without_tensors_is_read(tmp_path: Path) -> None:
    """As with `--no-tensor-first-split`."""
    original = original_of(tmp_path)
    parts = [tmp_path / f"tiny-0000{number}-of-00002.gguf" for number in (1, 2)]
    names = [tensor.name for tensor in GGUFReader(original).tensors]
    counts = {"split.count": 2, "split.tensors.count": len(names)}
    for number, part in enumerate(parts):
        write_gguf(part)
        edited(part, {"split.no": number, **counts}, without=names if number == 0 else ())
    is_same(GgufSource(parts[1]), original)
