"""Read a model's configuration from the keys of a GGUF file, renamed to the fields of `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from shortfin_apps.llm.builder.sources.base import Array, parse, unsupported
from shortfin_apps.llm.builder.sources.gguf_experts import EXPERT_KEYS, expert_fields
from shortfin_apps.llm.builder.sources.gguf_gemma4 import (
    GEMMA4_KEYS,
    gemma4_fields,
    gemma4_ropes,
)
from shortfin_apps.llm.builder.sources.gguf_latent import LATENT_KEYS, latent_fields
from shortfin_apps.llm.builder.sources.gguf_rope import ROPE_FACTORS, ROPE_FIELDS, ropes
from shortfin_apps.llm.builder.sources.gguf_tokenizer import GgufVocabulary
from shortfin_apps.llm.builder.sources.hf_rope import query_scaling
from shortfin_apps.llm.builder.sources.known_fields import KnownFields, names
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.families import OF_ARCHITECTURE, OF_SOME_FAMILIES
from shortfin_apps.llm.model.families.family import Config, Family

# GGUF keys without the prefix `ARCHITECTURE.` -> fields of Config.
FIELDS: Final = {
    "block_count": "num_hidden_layers",  # including the layers of a draft model, which come last
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "rope.dimension_count": "rotated_dim",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "full_attention_interval": "full_attention_interval",
    "nextn_predict_layers": "mtp_num_hidden_layers",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "linear_value_head_dim",  # the sum over all value heads; `read_config` divides
}
_KEYS = {field: key for key, field in FIELDS.items()}
_Read = Callable[[str, Mapping[str, Any], Mapping[str, tuple[int, ...]]], dict[str, Any]]
# Field of a family -> keys that its files have in another way than others, and the function that reads them.
_OWN: Final[Mapping[str, tuple[frozenset[str], _Read]]] = {
    "kv_lora_rank": (LATENT_KEYS, latent_fields),
    "scoring_func": (EXPERT_KEYS, expert_fields),
    "num_kv_shared_layers": (GEMMA4_KEYS, gemma4_fields),
}
# Fields that are not set if they are 0, as in llama.cpp.
_NONE_IF_0 = names(
    "intermediate_size moe_intermediate_size shared_expert_intermediate_size sliding_window "
    "attn_logit_softcapping final_logit_softcapping embedding_multiplier residual_multiplier "
    "attention_multiplier logits_scaling"
)


def gguf_family(where: str, architecture: object) -> Family:
    """Return the family with this GGUF architecture. Raises BuildError if there is none."""
    if not isinstance(architecture, str) or architecture not in OF_ARCHITECTURE:
        raise unsupported(where, f"architecture `{architecture}`")
    return OF_ARCHITECTURE[architecture]


def keys_below(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the metadata items with keys that start with `prefix`, with the prefix removed."""
    return {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}


def read_config(
    where: str,
    family: Family,
    keys: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, Array],
) -> Config:
    """Return the configuration. Raises BuildError for invalid keys and unsupported models.

    `keys`: metadata without the prefix `ARCHITECTURE.`; `shapes`: tensor name -> shape for all tensors of the
    file; `factors`: tensor name -> values, for the names in FACTORS that the file has.
    """
    if keys.get("expert_count") and "num_experts" not in family.fields:
        raise unsupported(where, "a mixture of experts")
    if "token_embd.weight" not in shapes:
        raise BuildError(f"{where}: tensor `token_embd.weight` is missing")
    config = parse(where, Config, _fields(where, family, keys, shapes), _KEYS)
    drafts = config.mtp_num_hidden_layers or 0
    has_layers = any(name.startswith("blk.0.") for name in shapes)
    if drafts >= config.num_hidden_layers or (drafts and not has_layers):
        raise unsupported(where, "a draft model alone")
    if family.architecture == "gemma4":
        rope, local_rope = gemma4_ropes(where, config, factors.get(ROPE_FACTORS))
    else:
        rope, local_rope = ropes(where, family, config, keys, factors)
    has_one_size = "attention.value_length" not in _own_keys(family)
    if has_one_size and keys.get("attention.value_length", config.head_size) != config.head_size:
        raise unsupported(where, "a value head that differs from the key head")
    update: dict[str, Any] = {
        "num_hidden_layers": config.num_hidden_layers - drafts,
        "linear_value_head_dim": config.linear_value_head_dim // config.linear_num_value_heads,
        "rope": rope,
        "local_rope": local_rope,
        "query_scaling": query_scaling(where, rope, config.llama_4_scaling_beta),
    }
    if family.scales_embedding:
        update["embedding_multiplier"] = config.hidden_size**0.5
    return config.model_copy(update=update)


def _fields(
    where: str, family: Family, keys: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Return the fields of a Config: from the keys, the tensors' shapes and the family's defaults."""
    known = known_keys(family).used & keys.keys() - _own_keys(family)
    layers = keys.get("block_count")
    given = dict(
        _field(where, f"{family.architecture}.{key}", field, keys[key], layers)
        for key, field in FIELDS.items()
        if key in known
    )
    given = {field: value for field, value in given.items() if value != 0 or field not in _NONE_IF_0}
    for field, (_, read) in _OWN.items():
        given |= read(where, keys, shapes) if field in family.fields else {}
    features = given.get("intermediate_size", given.get("moe_intermediate_size"))
    if features is None:
        raise BuildError(f"{where}: key `{family.architecture}.feed_forward_length` is missing")
    tensors = {
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "output_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
    }
    lacking = {
        "intermediate_size": features,  # files of mixtures of experts without dense layers may lack it
        "shared_expert_intermediate_size": features,
        "linear_value_head_dim": 4096,
    }
    return {**lacking, **family.gguf.defaults, **tensors, **given, "in_gguf": True}


def _field(where: str, name: str, field: str, value: Any, layers: object) -> tuple[str, Any]:
    """Return the Config field and its value for the key `name`, whose value may be an array of all layers."""
    if not isinstance(value, list):
        return field, value
    if len(value) != layers:
        raise BuildError(f"{where}: `{name}` has {len(value)} items for {layers} layers")
    if field == "sliding_window_pattern":
        return "layer_types", ["sliding_attention" if each else "full_attention" for each in value]
    if any(each != value[0] for each in value):
        raise unsupported(where, f"a model whose layers differ in `{name}`")
    return field, value[0]


def known_keys(family: Family) -> KnownFields:
    """Return the known keys, without the prefix `ARCHITECTURE.`, of files of this family."""
    own = {key for key, field in FIELDS.items() if field in family.fields}
    return GGUF_MODEL.using(own | _own_keys(family))


def _own_keys(family: Family) -> set[str]:
    return {key for field, (keys, _) in _OWN.items() if field in family.fields for key in keys}


def check_keys(where: str, family: Family, metadata: Mapping[str, Any], accepted: Collection[str]) -> None:
    """Raise BuildError for a key that would change the computation; `accepted`: unknown keys to ignore."""
    GGUF_FILE.check(where, {key: value for key, value in metadata.items() if key in GGUF_FILE.neutral})
    for prefix, known in ((f"{family.architecture}.", known_keys(family)), ("tokenizer.", GGUF_TOKENIZER)):
        known.check(where, keys_below(metadata, prefix), accepted, prefix)


# `used` has the keys that are read for all families. The other tables were made from ggml's docs/gguf.md and
# llama.cpp's `llama_model_loader`.
GGUF_MODEL = KnownFields(
    used=frozenset(key for key, field in FIELDS.items() if field not in OF_SOME_FAMILIES)
    | {*ROPE_FIELDS, "rope.scaling.finetuned", "attention.value_length"},
    # The sections separate time, height and width of positions in images; for text, all three are equal. The
    # norms of all supported families are RMS norms.
    harmless=names("vocab_size tensor_data_layout rope.dimension_sections attention.layer_norm_epsilon"),
    neutral={
        **dict.fromkeys(
            ("logit_scale", "residual_scale", "embedding_scale", "attention.output_scale"), (0, 1)
        ),
        "rope.scale_linear": (0, 1),  # older name of a linear scaling's factor
        **dict.fromkeys(("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"), (-1, 1)),
        **dict.fromkeys(("rope.scaling.yarn_log_multiplier", "attention.temperature_scale"), (0,)),
        **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attention.scale"), (0,)),
        **dict.fromkeys(("attention.max_alibi_bias", "attention.clamp_kqv", "pooling_type"), (0,)),
        **dict.fromkeys(
            ("expert_count", "expert_used_count", "expert_shared_count", "leading_dense_block_count"), (0,)
        ),
        **dict.fromkeys(("expert_shared_feed_forward_length", "expert_feed_forward_length"), (0,)),
        "expert_gating_func": (0, 1),  # softmax, explicitly or by default
        "expert_weights_norm": (True, False),  # experts' weights are normalised, whatever the key says
        "expert_weights_scale": (0, 1),
        **dict.fromkeys(("expert_group_count", "expert_group_used_count"), (0, 1)),
        **dict.fromkeys(("nextn_predict_layers", "interleave_moe_layer_step"), (0,)),
        "attention.causal": (True,),
        "use_parallel_residual": (),
        "attention.sliding_window_pattern": (),
        "rope.freq_base_swa": (),
    },
)

# Keys without the prefixes `ARCHITECTURE.` and `tokenizer.` that llama.cpp reads; all other such keys, as
# quantisers add them, are harmless.
GGUF_FILE = KnownFields(
    used=frozenset({"general.architecture"}),
    neutral={
        "general.type": ("model",),
        **dict.fromkeys(("adapter.type", "adapter.lora.alpha"), ()),
    },
)

# Keys `tokenizer.*`, without the prefix.
GGUF_TOKENIZER = KnownFields(
    used=frozenset(field.alias or name for name, field in GgufVocabulary.model_fields.items())
    - {"named_templates"},
    harmless=names(
        "ggml.token_type_count ggml.prefix_token_id ggml.suffix_token_id ggml.middle_token_id "
        "huggingface.json rwkv.world chat_templates"
    ),
    harmless_prefixes=("ggml.fim_", "chat_template."),
    neutral={"ggml.add_sep_token": (), "ggml.suppress_tokens": ()},
)
