from __future__ import annotations

import math

import pytest
from gguf.constants import Keys
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.builder.sources.gguf_config import (
    FIELDS,
    GGUF_FILE,
    GGUF_MODEL,
    GGUF_TOKENIZER,
    known_keys,
)
from shortfin_apps.llm.builder.sources.hf_config import HF_CONFIG, HF_ROPE, HfFields
from shortfin_apps.llm.builder.sources.known_fields import KnownFields
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.families import FAMILIES, OF_MODEL_TYPE
from shortfin_apps.llm.model.families.family import SET_BY_READER, Config, Family

TABLES = (HF_CONFIG, HF_ROPE, GGUF_MODEL, GGUF_FILE, GGUF_TOKENIZER)

# As it is published; the values are those of TinyLlama, SmolLM2, Llama 3.2 and Mistral 7B.
PUBLISHED = {
    "_name_or_path": "checkpoints",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}


# What those of other families have besides: Phi-4-mini, SmolLM3, Granite 3, Qwen3, Gemma 2 and 3.
PUBLISHED_BESIDES: dict[str, dict[str, object]] = {
    "phi3": {
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0,
    },
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4, "max_window_layers": 28},
    "granite": {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0},
    "qwen3": {"max_window_layers": 36, "use_sliding_window": False},
    "gemma2": {
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
    },
    "gemma3_text": {
        "_sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 10000.0,
        "use_bidirectional_attention": False,
    },
}


def test_published_configs_pass() -> None:
    HF_CONFIG.check("x", PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED_BESIDES)
def test_published_configs_of_other_families_pass(name: str) -> None:
    family = OF_MODEL_TYPE[name]
    HF_CONFIG.using(family.fields | family.harmless).check("x", PUBLISHED_BESIDES[name])


@pytest.mark.parametrize("table", TABLES)
def test_a_field_is_in_one_table(table: KnownFields) -> None:
    assert not table.used & table.harmless
    assert not (table.used | table.harmless) & table.neutral.keys()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_fields_of_families_are_read(family: Family) -> None:
    assert family.fields <= Config.model_fields.keys() | HfFields.model_fields.keys()
    assert not family.fields & SET_BY_READER
    assert family.defaults.keys() <= Config.model_fields.keys() | HfFields.model_fields.keys()
    assert family.gguf.defaults.keys() <= Config.model_fields.keys()
    assert not family.harmless & (HF_CONFIG.used | family.fields)


def test_keys_of_gguf_files_are_fields() -> None:
    assert set(FIELDS.values()) <= Config.model_fields.keys()
    assert len(set(FIELDS.values())) == len(FIELDS)


def test_a_key_is_known_if_its_field_is_the_familys() -> None:
    granite, llama = known_keys(OF_MODEL_TYPE["granite"]).used, GGUF_MODEL.used
    assert granite - llama == {"embedding_scale", "residual_scale", "attention.scale", "logit_scale"}


def test_the_tokenizer_keys_that_the_library_knows_are_known() -> None:
    keys = [v for k, v in vars(Keys.Tokenizer).items() if isinstance(v, str) and not k.startswith("_")]
    for key in keys:
        name = key.removeprefix("tokenizer.")
        known = GGUF_TOKENIZER.used | GGUF_TOKENIZER.harmless | GGUF_TOKENIZER.neutral.keys()
        assert name in known or name.startswith(GGUF_TOKENIZER.harmless_prefixes), key


@given(
    table=st.sampled_from(TABLES),
    name=st.text(min_size=1, max_size=8).map("x-{}".format),
    value=st.one_of(
        st.integers(), st.floats(), st.just(True), st.text(min_size=1), st.lists(st.none(), min_size=1)
    ),
)
def test_an_unknown_field_with_a_value_is_refused_unless_accepted(
    table: KnownFields, name: str, value: object
) -> None:
    with pytest.raises(BuildError, match="is not known here") as refused:
        table.check("x", {name: value})
    assert f"--accept-field {name}`" in str(refused.value)
    table.check("x", {name: value}, accepted=[name])


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_empty_field_passes(table: KnownFields, value: object) -> None:
    table.check("x", {"whatever": value})


def test_false_says_something_where_true_is_neutral() -> None:
    table = KnownFields(used=frozenset(), neutral={"causal": (True,), "bias": (0,), "factor": (1,)})
    table.check("x", {"causal": True, "bias": False, "factor": False})
    with pytest.raises(BuildError, match="`causal` is False, which is not supported"):
        table.check("x", {"causal": False})


@given(value=st.floats(allow_nan=False).filter(lambda v: not math.isclose(v, 1, rel_tol=1e-5)) | st.just(0))
def test_a_factor_that_is_not_one_is_refused_and_cannot_be_accepted(value: float) -> None:
    for table, prefix in ((HF_CONFIG, ""), (HF_ROPE, "rope_parameters.")):
        with pytest.raises(BuildError, match=rf"`{prefix}partial_rotary_factor` is .*not supported"):
            table.check("x", {"partial_rotary_factor": value}, ["partial_rotary_factor"], prefix)
        table.check("x", {"partial_rotary_factor": 1.0})


def test_a_message_is_one_line() -> None:
    with pytest.raises(BuildError) as refused:
        HF_CONFIG.check("x", {"odd": "a\n" + "b" * 1000, "long": "c" * 1000})
    assert "\n" not in str(refused.value)
    with pytest.raises(BuildError) as refused:
        HF_CONFIG.check("x", {"long": "c" * 1000})
    assert len(str(refused.value)) < 200
