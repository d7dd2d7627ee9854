"""Writes `random:tiny` in the formats of other tools: a GGUF file, a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from shortfin_apps.llm.builder.sources.base import TokenizerFiles
from shortfin_apps.llm.builder.sources.random_tiny import RandomTinySource
from shortfin_apps.llm.model.spec import tensor_shapes
from tests.builder.specs import ffn_features

Array = npt.NDArray[Any]

TINY = RandomTinySource()
SPEC = TINY.spec


def tiny_tensors() -> dict[str, Array]:
    return {name: TINY.tensor(name) for name in tensor_shapes(SPEC)}


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    keys: Mapping[str, int | float | str | list[int]] | None = None,
    file_keys: Mapping[str, int | float | str] | None = None,
    tensors: Mapping[str, Array] | None = None,
    without: str | None = None,
    quantised: GGMLQuantizationType | None = None,
    otherwise: Mapping[str, GGMLQuantizationType] | None = None,
    whole: Mapping[str, Array] | None = None,
) -> Path:
    """Writes a GGUF file. `keys` (`llama.` keys without prefix), `file_keys` (others) and `tensors` add to or
    replace its content; matrices are `quantised`, but those named in `otherwise`, unless they are bytes
    already. `whole` are the tensors of another model, as the file is to have them.
    """
    writer = GGUFWriter(path, architecture)
    values: dict[str, int | float | str | list[int]] = {
        "block_count": len(SPEC.layers),
        "context_length": SPEC.max_position_embeddings,
        "embedding_length": SPEC.hidden_size,
        "feed_forward_length": ffn_features(SPEC),
        "attention.head_count": SPEC.attention.heads,
        "attention.head_count_kv": SPEC.attention.kv_heads,
        "attention.layer_norm_rms_epsilon": SPEC.rms_norm_eps,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": SPEC.attention.head_dim,
    }
    named = {f"{architecture}.{key}": value for key, value in {**values, **(keys or {})}.items()}
    for key, value in {**named, **(file_keys or {})}.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)]
        add(key, value)  # type: ignore[operator]
    writer.add_name(SPEC.name)
    ours = {**tiny_tensors(), **(tensors or {})}
    stored = whole or {n: _interleaved(n, array) for n, array in ours.items()}
    _add_vocabulary(writer, TINY.tokenizer_files(), len(stored["token_embd.weight"]))
    for name, array in stored.items():
        if name != without:
            _add_tensor(writer, name, array, (otherwise or {}).get(name, quantised))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_hf(
    directory: Path, *, config: Mapping[str, object] | None = None, shards: int = 1, dtype: Any = np.float32
) -> Path:
    """Writes a Hugging Face directory. `config` adds to or replaces the fields of `config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    values = {
        "model_type": "llama",
        "vocab_size": SPEC.vocab_size,
        "hidden_size": SPEC.hidden_size,
        "intermediate_size": ffn_features(SPEC),
        "num_hidden_layers": len(SPEC.layers),
        "num_attention_heads": SPEC.attention.heads,
        "num_key_value_heads": SPEC.attention.kv_heads,
        "max_position_embeddings": SPEC.max_position_embeddings,
        "rms_norm_eps": SPEC.rms_norm_eps,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 258,
    }
    _write_json(directory / "config.json", {**values, **(config or {})})
    files = TINY.tokenizer_files()
    (directory / "tokenizer.json").write_text(files.tokenizer, encoding="utf-8")
    _write_json(directory / "tokenizer_config.json", {**files.config, "tokenizer_class": "Ignored"})
    _write_json(directory / "generation_config.json", {**files.generation, "temperature": 0.5})
    _write_safetensors(directory, shards, dtype)
    return directory


def _write_safetensors(directory: Path, shards: int, dtype: Any) -> None:
    tensors = {_hf_name(name): array.astype(dtype) for name, array in tiny_tensors().items()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    names = {
        name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors"
        for index, name in enumerate(sorted(tensors))
    }
    for shard in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == shard}, directory / shard)
    _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": names})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _add_tensor(writer: GGUFWriter, name: str, array: Array, quantised: GGMLQuantizationType | None) -> None:
    if quantised is None or array.ndim == 1:
        writer.add_tensor(name, array)
    else:
        data = array if array.dtype == np.uint8 else quants.quantize(array, quantised)
        writer.add_tensor(name, data, raw_dtype=quantised)


def _add_vocabulary(writer: GGUFWriter, files: TokenizerFiles, rows: int) -> None:
    """Adds the tokens that have one of the embedding's `rows`."""
    tokenizer = Tokenizer.from_str(files.tokenizer)
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])[:rows]
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types(
        [TokenType.CONTROL if token in special else TokenType.NORMAL for token, _ in vocab]
    )
    writer.add_bos_token_id(files.generation["bos_token_id"])
    writer.add_eos_token_id(files.generation["eos_token_id"][0])
    writer.add_pad_token_id(files.generation["pad_token_id"])
    writer.add_chat_template(files.config["chat_template"])
    writer.add_add_bos_token(False)


def _interleaved(name: str, array: Array) -> Array:
    heads = {"attn_q": SPEC.attention.heads, "attn_k": SPEC.attention.kv_heads}
    kind = name.split(".")[-2]
    if kind not in heads or array.ndim == 1:
        return array
    return interleaved(array, heads[kind])


def interleaved(array: Array, heads: int) -> Array:
    """The `permute` of llama.cpp's convert_hf_to_gguf.py, which the GGUF reader reverses."""
    split = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)


def _hf_name(name: str) -> str:
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in whole:
        return whole[name]
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{parts[kind]}.weight"
