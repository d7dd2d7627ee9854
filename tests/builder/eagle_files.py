"""Directories of EAGLE-3 heads as they are published, with made-up weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from tests.golden.family_weights import weight

Tensors = dict[str, npt.NDArray[Any]]

FEATURES = 64  # of the feed-forward
READS = (2, 3, 1)  # which are numbers of layers, as they do not begin with 1


def head_config(model: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The config.json of a head for a model with the config `model`; a change to None drops a field."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "draft_vocab_size": 32,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(READS), "use_aux_hidden_state": True},
        "head_dim": model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"],
        "hidden_act": "silu",
        "intermediate_size": FEATURES,
        "max_window_layers": 36,
        "num_hidden_layers": 1,
        "rope_theta": 500.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **{
            name: model[name]
            for name in (
                *("hidden_size", "max_position_embeddings", "num_attention_heads", "num_key_value_heads"),
                *("rms_norm_eps", "vocab_size"),
            )
        },
    }
    return {name: value for name, value in (config | changes).items() if value is not None}


def head_tensors(config: Mapping[str, Any]) -> Tensors:
    """The tensors of a head with this config.json; it has every second token of the model at most."""
    hidden, features, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    count, vocab_size = config["draft_vocab_size"], config["vocab_size"]
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (features, hidden),
        "midlayer.mlp.up_proj.weight": (features, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, features),
        "norm.weight": (hidden,),
        "lm_head.weight": (count, hidden),
    }
    tensors: Tensors = {name: weight(name, shape) for name, shape in shapes.items()}
    if count != vocab_size:
        token_ids = np.arange(count) * 2 + 3
        tensors["d2t"] = (token_ids - np.arange(count)).astype(np.int64)
        tensors["t2d"] = np.isin(np.arange(vocab_size), token_ids)
    return tensors


def write_head(directory: Path, config: Mapping[str, Any], tensors: Tensors | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    directory.joinpath("config.json").write_text(json.dumps(config))
    save_file(head_tensors(config) if tensors is None else tensors, directory / "model.safetensors")
    return directory
