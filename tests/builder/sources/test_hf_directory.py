from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.attention import Attention, QueryScaling
from shortfin_apps.llm.model.rope import Llama3Scaling, Rope, YarnScaling
from tests.builder.golden_families import GoldenFamily
from tests.builder.model_files import SPEC, TINY, tiny_tensors, write_hf
from tests.builder.specs import changed, rope_of, windows_of


@pytest.mark.parametrize("shards", [1, 3])
def test_reads_what_was_written(tmp_path: Path, shards: int) -> None:
    source = HfDirectorySource(write_hf(tmp_path / "random-tiny", shards=shards))
    assert source.spec == SPEC
    for name, expected in tiny_tensors().items():
        np.testing.assert_array_equal(source.tensor(name), expected, err_msg=name)


def test_reads_bf16(tmp_path: Path) -> None:
    source = HfDirectorySource(write_hf(tmp_path, dtype=ml_dtypes.bfloat16))
    name = "blk.1.attn_k.weight"
    np.testing.assert_array_equal(source.tensor(name), TINY.tensor(name).astype(ml_dtypes.bfloat16))


def test_tokenizer_files(tmp_path: Path) -> None:
    directory = write_hf(tmp_path)
    files, expected = HfDirectorySource(directory).tokenizer_files(), TINY.tokenizer_files()
    assert files.tokenizer == expected.tokenizer
    assert files.config == expected.config
    assert files.generation == {**expected.generation, "temperature": 0.5}
    (directory / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert HfDirectorySource(directory).tokenizer_files().config["chat_template"] == "{{ messages }}"
    (directory / "generation_config.json").unlink()
    assert HfDirectorySource(directory).tokenizer_files().generation == {"eos_token_id": [258]}
    (directory / "tokenizer.json").unlink()
    with pytest.raises(BuildError, match=r"has no tokenizer\.json, tekken\.json or tokenizer\.model"):
        HfDirectorySource(directory).tokenizer_files()


def test_a_template_of_the_processor_is_used_if_the_tokenizer_has_none(tmp_path: Path) -> None:
    directory = write_hf(tmp_path)
    (directory / "chat_template.json").write_text('{"chat_template": "a processor\'s"}', encoding="utf-8")
    own = TINY.tokenizer_files().config["chat_template"]
    assert HfDirectorySource(directory).tokenizer_files().config["chat_template"] == own
    (directory / "tokenizer_config.json").unlink()
    assert HfDirectorySource(directory).tokenizer_files().config["chat_template"] == "a processor's"


def test_the_hash_covers_every_file(tmp_path: Path) -> None:
    before = HfDirectorySource(write_hf(tmp_path)).sha256
    assert HfDirectorySource(tmp_path).sha256 == before
    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    assert HfDirectorySource(tmp_path).sha256 != before


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_rotary_scaling(tmp_path: Path, key: str) -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        **({"rope_theta": 500000.0} if key == "rope_parameters" else {}),
    }
    spec = HfDirectorySource(write_hf(tmp_path, config={key: rope})).spec
    assert rope_of(spec).scaling == Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    assert rope_of(spec).theta == (500000.0 if key == "rope_parameters" else rope_of(SPEC).theta)
    del rope["factor"]
    with pytest.raises(BuildError, match="`llama3` is incomplete"):
        HfDirectorySource(write_hf(tmp_path, config={key: rope}))


def test_mistral_has_its_window_in_all_layers(tmp_path: Path) -> None:
    directory = write_hf(tmp_path / "random-tiny", config={"model_type": "mistral", "sliding_window": 256})
    layers = tuple(range(len(SPEC.layers)))
    expected = changed(SPEC, {"architecture": "mistral"}, at={layer: {"window": 256} for layer in layers})
    assert HfDirectorySource(directory).spec == expected


def test_yarn_takes_what_is_missing_from_the_context(tmp_path: Path) -> None:
    rope = {"type": "yarn", "factor": 4.0}
    spec = HfDirectorySource(write_hf(tmp_path, config={"rope_scaling": rope})).spec
    assert rope_of(spec).scaling == YarnScaling(
        factor=4.0,
        original_max_position_embeddings=SPEC.max_position_embeddings,
        attention_factor=0.1 * math.log(4) + 1,
    )
    rope = {"type": "yarn", "original_max_position_embeddings": 256, "mscale": 2.0, "mscale_all_dim": 1.0}
    scaling = rope_of(HfDirectorySource(write_hf(tmp_path, config={"rope_scaling": rope})).spec).scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.factor == SPEC.max_position_embeddings / 256
    assert scaling.attention_factor == pytest.approx((0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(("switch", "layers"), [(True, (1,)), (False, ())])
def test_a_qwen_has_its_window_only_where_it_is_switched_on(
    tmp_path: Path, switch: bool, layers: tuple[int, ...]
) -> None:
    family = GoldenFamily.of("qwen3")
    config = {"sliding_window": 256, "use_sliding_window": switch, "max_window_layers": 1}
    family.config.update(config | {"layer_types": None})
    spec = HfDirectorySource(family.write_hf(tmp_path)).spec
    windows = windows_of(spec)
    assert [windows[layer] for layer in layers] == [256] * len(layers)
    assert [n for n, window in enumerate(windows) if window] == list(layers)


def test_older_fields_of_a_gemma_3_mean_the_same(tmp_path: Path) -> None:
    family = GoldenFamily.of("gemma3")
    now = HfDirectorySource(family.write_hf(tmp_path / "model")).spec
    rope = family.config.pop("rope_parameters")["full_attention"]
    theta = rope.pop("rope_theta")
    family.config.update(rope_theta=theta, rope_local_base_freq=10000.0, rope_scaling=rope)
    for name in ("layer_types", "tie_word_embeddings", "hidden_activation"):
        del family.config[name]
    family.config["sliding_window_pattern"] = 6
    assert HfDirectorySource(family.write_hf(tmp_path / "model")).spec == now


def test_a_ministral_3_without_rope_fields_has_those_of_the_8b(tmp_path: Path) -> None:
    family = GoldenFamily.of("ministral3")
    del family.config["rope_parameters"]
    [attention] = HfDirectorySource(family.write_hf(tmp_path)).spec.blocks_of(Attention)
    assert attention.query_scaling == QueryScaling(beta=0.1, period=16384)
    scaling = YarnScaling(factor=16.0, original_max_position_embeddings=16384, attention_factor=1.0)
    assert attention.rope == Rope(theta=1e6, scaling=scaling)


def test_older_fields_of_a_gemma_4_mean_the_same(tmp_path: Path) -> None:
    family = GoldenFamily.of("gemma4")
    now = HfDirectorySource(family.write_hf(tmp_path / "model")).spec
    assert [block.head_dim for block in now.blocks_of(Attention)] == [20, 40]
    del family.config["per_layer_config"]
    family.config.update(global_head_dim=40, num_global_key_value_heads=1)
    assert HfDirectorySource(family.write_hf(tmp_path / "model")).spec == now


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"enable_moe_block": True}, "a token cannot have 0 of 0 experts"),
        ({"hidden_size_per_layer_input": 16}, r"`blk\.0\.inp_gate\.weight` is missing"),
        ({"num_kv_shared_layers": 2}, "layers without others of their kind before them"),
        ({"num_kv_shared_layers": 3}, "layers without others of their kind before them"),
        ({"use_bidirectional_attention": "all"}, "`use_bidirectional_attention` is all"),
        ({"per_layer_config": {"0": {"head_dim": 40}}}, "differs between layers"),
        ({"per_layer_config": {"1": {"sliding_window": 4}}}, "`per_layer_config.1.sliding_window`"),
        ({"attention_k_eq_v": False}, r"`blk\.1\.attn_v\.weight` is missing"),
    ],
)
def test_a_gemma_4_is_refused_by_what_is_missing(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    family = GoldenFamily.of("gemma4")
    family.config.update(fields)
    with pytest.raises(BuildError, match=message):
        HfDirectorySource(family.write_hf(tmp_path))


def test_each_expert_has_a_factor(tmp_path: Path) -> None:
    family = GoldenFamily.of("gemma4-moe")
    name = "model.layers.1.router.per_expert_scale"
    family.tensors[name] = np.ones(6, np.float32)
    with pytest.raises(BuildError, match=r"`blk\.1\.ffn_down_exps\.scale` has shape \(6,\), expected \(7,\)"):
        HfDirectorySource(family.write_hf(tmp_path))
    del family.tensors[name]
    with pytest.raises(BuildError, match=r"`blk\.1\.ffn_down_exps\.scale` is missing"):
        HfDirectorySource(family.write_hf(tmp_path))


def test_quantised_experts_with_factors_are_matrices_of_their_own(tmp_path: Path) -> None:
    """Which quantisers make of Gemma 4's stacks."""
    family = GoldenFamily.of("gemma4-moe")
    family.config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [32, 32],
    }
    tensors: dict[str, Any] = {n: t for n, t in family.tensors.items() if ".experts." not in n}
    for layer in range(2):
        prefix = f"model.layers.{layer}.experts"
        gate, up = np.split(family.tensors[f"{prefix}.gate_up_proj"], 2, axis=1)
        for kind, stack in {"gate": gate, "up": up, "down": family.tensors[f"{prefix}.down_proj"]}.items():
            for expert, values in enumerate(stack):
                name = f"{prefix}.{expert}.{kind}_proj.weight"
                tensors[name] = (2 * values).astype(ml_dtypes.float8_e4m3fn)
                tiles = [-(-size // 32) for size in values.shape]
                tensors[f"{name}_scale_inv"] = np.full(tiles, 0.5, np.float32)
    source = HfDirectorySource(replace(family, tensors=tensors).write_hf(tmp_path))
    down = tensors["model.layers.0.experts.2.down_proj.weight"].astype(np.float32) / 2
    np.testing.assert_array_equal(source.tensor("blk.0.ffn_down.2.weight"), down)
    factors = family.tensors["model.layers.0.router.per_expert_scale"]
    np.testing.assert_array_equal(source.tensor("blk.0.ffn_down_exps.scale"), factors)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_scale_of_embeddings_is_rounded_to_the_type_of_weights(tmp_path: Path, field: str) -> None:
    family = GoldenFamily.of("gemma3")
    del family.config["dtype"]
    family.config[field] = "bfloat16"
    assert HfDirectorySource(family.write_hf(tmp_path)).spec.embedding_scale == 6.9375  # of sqrt(48)


def test_a_tied_head_is_ignored(tmp_path: Path) -> None:
    assert HfDirectorySource(
        write_hf(tmp_path, config={"tie_word_embeddings": True})
    ).spec.tie_word_embeddings


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "cohere2"}, "architecture `cohere2` is not supported; supported are Llama"),
        ({"hidden_act": "gelu"}, "activation `gelu`"),
        ({"model_type": "gpt_oss", "hidden_act": "gelu_pytorch_tanh"}, "activation `gelu_pytorch_tanh`"),
        ({"attention_bias": True}, r"`blk\.0\.attn_k\.bias` is missing"),
        ({"mlp_bias": True}, r"`blk\.0\.ffn_down\.bias` is missing"),
        ({"model_type": "mixtral", "mlp_bias": True}, "a bias in the feed-forward of a mixture of experts"),
        ({"model_type": "qwen2"}, r"`blk\.0\.attn_k\.bias` is missing"),
        ({"model_type": "qwen3", "head_dim": 16}, r"`blk\.0\.attn_k_norm\.weight` is missing"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by `gptq`"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary scaling `dynamic`"),
        ({"rope_scaling": {"type": "linear"}}, "`linear` is incomplete"),
        ({"rope_scaling": {"type": "yarn", "beta_fast": 1.0}}, "`yarn` is incomplete"),
        (
            {"model_type": "ministral3", "rope_parameters": {"llama_4_scaling_beta": 0.1}},
            "`llama_4_scaling_beta`. without YaRN",
        ),
        ({"rope_theta": 1.0}, "must exceed 1"),
        ({"num_hidden_layers": "many"}, "`num_hidden_layers`"),
        ({"num_hidden_layers": 3}, r"`blk\.2\.attn_k\.weight` is missing"),
        ({"head_dim": 15}, "not even"),
        ({"intermediate_size": 100}, "has shape"),
    ],
)
def test_refuses_other_architectures(tmp_path: Path, config: dict[str, object], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        HfDirectorySource(write_hf(tmp_path, config=config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"partial_rotary_factor": 0.5},
            "`partial_rotary_factor` is 0.5, which is not supported; .* delete the field",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"`rope_parameters\.partial_rotary_factor`"),
        ({"rope_parameters": {"llama_4_scaling_beta": 0.1}}, r"`rope_parameters\.llama_4_scaling_beta`"),
        ({"embedding_multiplier": 12.0}, "`embedding_multiplier` is 12.0"),
        ({"final_logit_softcapping": 30.0}, "`final_logit_softcapping` is 30.0"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "`layer_types` of `sliding_attention`"),
        ({"layer_types": ["full_attention"]}, "`layer_types` has not one item for each layer"),
        ({"hyper_gates": 3}, "`hyper_gates` is 3, and whether .*`--accept-field hyper_gates`"),
    ],
)
def test_refuses_unsupported_fields(tmp_path: Path, config: dict[str, object], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        HfDirectorySource(write_hf(tmp_path, config=config))


@pytest.mark.parametrize(
    "config",
    [
        {"partial_rotary_factor": 1.0},
        {"layer_types": ["full_attention", "full_attention"]},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 512},
        {"embedding_multiplier": 1, "rope_interleaved": False, "num_experts": 0},
    ],
)
def test_neutral_values_pass(tmp_path: Path, config: dict[str, object]) -> None:
    HfDirectorySource(write_hf(tmp_path, config=config))


def test_an_unknown_field_may_be_accepted(tmp_path: Path) -> None:
    HfDirectorySource(write_hf(tmp_path, config={"hyper_gates": 3}), accepted=["hyper_gates"])


def test_refuses_missing_weights_and_paths_outside(tmp_path: Path) -> None:
    write_hf(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BuildError, match="must be in safetensors form"):
        HfDirectorySource(tmp_path)
    index = {"weight_map": {"lm_head.weight": "../other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(BuildError, match="not the name of a file in its folder"):
        HfDirectorySource(tmp_path)


def longrope() -> dict[str, object]:
    """With an original context that has no logarithm to divide by."""
    factors = [1.0] * (SPEC.attention.head_dim // 2)
    sizes = {"factor": 2.0, "original_max_position_embeddings": 1}
    return {"type": "longrope", "short_factor": factors, "long_factor": factors, **sizes}


def yarn(**fields: float) -> dict[str, object]:
    return {"type": "yarn", "factor": 4.0, **fields}


def blocks_of(shape: list[int]) -> dict[str, object]:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": shape}
    groups = {"group_0": {"weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": groups,
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [
    "hidden_size",
    "rope_scaling",
    "head_dim",
    "rope_theta",
    "eos_token_id",
    "sliding_window",
    "vocab_size",
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1))
def test_any_config_is_read_or_refused(tmp_path: Path, config: dict[str, object]) -> None:
    if not (tmp_path / "config.json").exists():
        write_hf(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}), encoding="utf-8")
    assert "\n" not in (_refusal(tmp_path) or "")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["config.json", "model.safetensors", "tokenizer_config.json"]), content=st.binary()
)
def test_any_bytes_are_read_or_refused(tmp_path: Path, name: str, content: bytes) -> None:
    write_hf(tmp_path)
    (tmp_path / name).write_bytes(content)
    assert "\n" not in (_refusal(tmp_path) or "")


@pytest.mark.parametrize(
    "config",
    [
        {"head_dim": 10**400},
        {"model_type": "phi3", "partial_rotary_factor": 1e999},
        {"model_type": "phi3", "partial_rotary_factor": 1e308},
        {"model_type": "gemma3_text", "hidden_size": 10**400},
        {"rope_scaling": longrope()},
        {"rope_scaling": yarn(mscale=1.0, mscale_all_dim=-10 / math.log(4))},
        {"rope_scaling": yarn(beta_fast=1e999)},
        {"rope_scaling": yarn(beta_fast=1e300)},
        {"rope_scaling": yarn(beta_slow=1e-320)},
        {"model_type": "granite", "residual_multiplier": 1e-320},
        {"model_type": "granite", "residual_multiplier": 1e-160},
        {"model_type": "granite", "logits_scaling": 1e-320},
        *({"quantization_config": blocks_of(shape)} for shape in ([128], [128] * 3, [0, 128])),
    ],
)
def test_refuses_numbers_that_no_model_has(tmp_path: Path, config: dict[str, object]) -> None:
    refusal = _refusal(write_hf(tmp_path, config=config))
    assert refusal is not None
    assert re.search("no model has|should be (a finite|less|greater)|items?|Field required", refusal)


def _refusal(directory: Path) -> str | None:
    """The reason why the directory was refused; None if all of it could be read."""
    try:
        HfDirectorySource(directory).tokenizer_files()
    except BuildError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_refuses_a_file_too_large_to_be_metadata_before_it_is_read(tmp_path: Path, name: str) -> None:
    file = write_hf(tmp_path) / name
    file.touch()
    os.truncate(file, 1 << 40)
    with pytest.raises(BuildError, match=f"{name}: has 1,099,511,627,776 bytes, but at most"):
        directory_source_without_hash(tmp_path).tokenizer_files()


def directory_source_without_hash(directory: Path) -> HfDirectorySource:
    """A source whose files are not hashed, which takes long for a file of a terabyte."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shortfin_apps.llm.builder.sources.hf_directory.sha256_of", lambda paths: "")
        return HfDirectorySource(directory)


def test_refuses_more_layers_than_lists_are_made_for(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 10**12, "model_type": "mistral", "sliding_window": 4}
    with pytest.raises(BuildError, match=r"`num_hidden_layers`: Input should be less than or equal to 4096"):
        HfDirectorySource(write_hf(tmp_path, config=config))


def test_refuses_a_tensor_of_a_long_name(tmp_path: Path) -> None:
    directory = write_hf(tmp_path)
    save_file({"a" * 300_000: np.zeros(1, np.float32)}, directory / "model.safetensors")
    with pytest.raises(BuildError, match="a tensor's name has 300,000 characters, but at most 512"):
        HfDirectorySource(directory)


def test_refuses_a_long_chat_template(tmp_path: Path) -> None:
    (write_hf(tmp_path) / "chat_template.jinja").write_text("a" * 2_000_000, encoding="utf-8")
    with pytest.raises(BuildError, match="a chat template has 2,000,000 characters, but at most 1,048,576"):
        HfDirectorySource(tmp_path).tokenizer_files()


def test_every_sampling_field_of_the_publisher_is_kept(tmp_path: Path) -> None:
    published = {"repetition_penalty": 1.3, "typical_p": 0.9, "max_new_tokens": 7, "no_repeat_ngram_size": 3}
    file = write_hf(tmp_path) / "generation_config.json"
    file.write_text(json.dumps({**published, "transformers_version": "4.9", "top_p": None}), encoding="utf-8")
    generation = HfDirectorySource(tmp_path).tokenizer_files().generation
    assert generation == {**published, "eos_token_id": [258]}


def test_named_templates_are_kept_with_the_default_one(tmp_path: Path) -> None:
    directory = write_hf(tmp_path)
    before = HfDirectorySource(directory).sha256
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools", encoding="utf-8")
    (directory / "chat_template.jinja").write_text("plain", encoding="utf-8")
    source = HfDirectorySource(directory)
    assert source.sha256 != before
    assert source.tokenizer_files().config["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]


def test_an_end_token_that_only_the_map_of_special_tokens_names_is_kept(tmp_path: Path) -> None:
    directory = write_hf(tmp_path)
    (directory / "tokenizer_config.json").write_text(
        '{"eos_token": null, "bos_token": "b"}', encoding="utf-8"
    )
    named = {"eos_token": {"content": "e"}, "bos_token": "other", "sep_token": "s"}
    (directory / "special_tokens_map.json").write_text(json.dumps(named), encoding="utf-8")
    config = HfDirectorySource(directory).tokenizer_files().config
    assert config == {"eos_token": {"content": "e"}, "bos_token": "b", "sep_token": "s"}


def test_an_end_that_is_null_in_the_generation_config_is_that_of_the_model(tmp_path: Path) -> None:
    (write_hf(tmp_path) / "generation_config.json").write_text('{"eos_token_id": null}', encoding="utf-8")
    assert HfDirectorySource(tmp_path).tokenizer_files().generation == {"eos_token_id": [258]}


def test_refuses_a_table_of_characters_that_says_that_it_is_longer_than_it_is(tmp_path: Path) -> None:
    file = write_hf(tmp_path) / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    table = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, table]}
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(BuildError, match=r"tokenizer\.json: `precompiled_charsmap` has 4 bytes, too few"):
        HfDirectorySource(tmp_path).tokenizer_files()


@pytest.mark.parametrize("part", ["vocab", "pieces", "added_tokens"])
def test_refuses_a_token_longer_than_any(tmp_path: Path, part: str) -> None:
    file = write_hf(tmp_path) / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    long = "é" * 600
    if part == "added_tokens":
        tokenizer["added_tokens"].append({"id": 999, "content": long})
    else:
        tokenizer["model"]["vocab"] = {long: 999} if part == "vocab" else [[long, 0.0]]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(BuildError, match=r"tokenizer\.json: a token of the vocabulary has 1,200 bytes"):
        HfDirectorySource(tmp_path).tokenizer_files()
