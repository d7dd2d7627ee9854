"""Converts one model's weights to each server's format, all from the same GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
from safetensors.numpy import save_file

from bench.peers.cache import Cache
from bench.peers.subject import Subject
from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.model.families import llama
from shortfin_apps.llm.model.feed_forward import MLP
from shortfin_apps.llm.model.spec import ModelSpec, tensor_shapes

_HUGGING_FACE_NAMES = {gguf: name for name, gguf in llama.NAMES.items()}


def model_directory(cache: Cache) -> Path:
    """Return the Hugging Face directory of SmolLM2, writing it if it is missing. Raises SetUpError."""
    directory = cache.root / "model-hf"
    gguf = Subject().gguf(cache.root / "downloads")
    what = f"bf16 safetensors of {gguf.name}"
    cache.once(directory.name, what, lambda: write_hugging_face(gguf, directory))
    return directory


def write_hugging_face(gguf: Path, directory: Path) -> None:
    """Write a Hugging Face model directory with bf16 safetensors."""
    source = GgufSource(gguf)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        hugging_face_name(name): source.tensor(name).astype(ml_dtypes.bfloat16)
        for name in tensor_shapes(source.spec)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    files = source.tokenizer_files()
    (directory / "tokenizer.json").write_text(files.tokenizer, encoding="utf-8")
    tokenizer_class = {"tokenizer_class": "PreTrainedTokenizerFast"}
    _write_json(directory / "tokenizer_config.json", files.config | tokenizer_class)
    _write_json(directory / "generation_config.json", files.generation)
    _write_json(directory / "config.json", hugging_face_config(source.spec, files.generation))


def hugging_face_name(name: str) -> str:
    """Convert a tensor's GGUF name to its name in a Hugging Face Llama."""
    *layer, kind, leaf = name.split(".")
    prefix = f"model.layers.{layer[1]}." if layer else ""
    return f"{prefix}{_HUGGING_FACE_NAMES[kind]}.{leaf}"


def hugging_face_config(spec: ModelSpec, tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json`; `tokens` has the ids of special tokens."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.blocks_of(MLP)[0].features,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": spec.attention.heads,
        "num_key_value_heads": spec.attention.kv_heads,
        "head_dim": spec.attention.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.attention.rope.theta if spec.attention.rope else None,
        "tie_word_embeddings": spec.tie_word_embeddings,
        **{key: tokens[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in tokens},
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
