"""Files of shapes that are published and cannot be built: each is refused by its header, in one sentence."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFReader, TokenType

from shortfin_apps.llm.builder.sources.first_look import look_at_gguf
from shortfin_apps.llm.contract.errors import BuildError
from tests.builder.gguf_edits import EMBEDDINGS, family, tiny, with_bytes, with_tokens, write_keys
from tests.builder.golden_families import GoldenFamily
from tests.builder.model_files import SPEC


def plain(folder: Path, content: bytes) -> Path:
    path = folder / "tiny.gguf"
    path.write_bytes(content)
    return path


def of_type(folder: Path, number: int) -> Path:
    """A file whose first tensor is said to be of the type with this number."""
    path = tiny(folder)
    name = GGUFReader(path).tensors[0].name.encode()
    info = path.read_bytes().index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (dims,) = struct.unpack_from("<I", path.read_bytes(), info)
    return with_bytes(path, info + 4 + 8 * dims, struct.pack("<I", number))


def header(folder: Path, architecture: str, **keys: Any) -> Path:
    named = {name.replace("__", "."): value for name, value in keys.items()}
    return write_keys(folder / "tiny.gguf", architecture, named)


def key(name: str, value: Any) -> Callable[[Path], Path]:
    return lambda folder: tiny(folder, keys={name: value})


def without(name: str) -> Callable[[Path], Path]:
    return lambda folder: tiny(folder, without=[name])


def tensor(name: str, *shape: int) -> Callable[[Path], Path]:
    return lambda folder: tiny(folder, tensors={name: np.ones(shape, np.float32)})


def unmerged(folder: Path) -> Path:
    return with_tokens(folder, {"whole": TokenType.NORMAL})


def more_tokens_than_rows(folder: Path) -> Path:
    embeddings = {name: np.ones((SPEC.vocab_size - 1, SPEC.hidden_size), np.float32) for name in EMBEDDINGS}
    return tiny(folder, tensors=embeddings)


def bent_factors(folder: Path) -> Path:
    factors = np.linspace(1, 8, SPEC.attention.head_dim // 2, dtype=np.float32)
    return tiny(folder, tensors={"rope_freqs.weight": factors})


def names_of_layers(name: str, folder: Path, layers: tuple[int, ...]) -> list[str]:
    path = GoldenFamily.of(name).write_gguf(folder / "names.gguf")
    prefixes = tuple(f"blk.{layer}." for layer in layers)
    return [tensor.name for tensor in GGUFReader(path).tensors if tensor.name.startswith(prefixes)]


LAYERS = len(SPEC.layers)
# What is published -> a file of that shape, and what its refusal says.
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "LoRA adapter": (
        lambda folder: header(folder, "llama", general__type="adapter", adapter__type="lora"),
        "is a LoRA adapter, .*merge it into its base model with llama.cpp's `llama-export-lora`",
    ),
    "LoRA adapter of 2024": (
        lambda folder: header(folder, "llama", adapter__type="lora"),
        "is a LoRA adapter",
    ),
    "mmproj": (
        lambda folder: header(folder, "clip", general__type="mmproj", clip__has_vision_encoder=True),
        "is the image or audio encoder of a model; give the GGUF file of the model itself",
    ),
    "mmproj of 2024": (lambda folder: header(folder, "clip"), "is the image or audio encoder of a model"),
    "imatrix": (
        lambda folder: header(folder, "", general__type="imatrix", imatrix__chunk_size=512),
        "is an importance matrix, which quantisers read; give the GGUF file of the model",
    ),
    "control vector": (lambda folder: header(folder, "controlvector"), "is a control vector"),
    "Gemma 3 with its image encoder": (
        lambda folder: family("gemma3", folder, {"mm.tokens_per_image": 256, "vision.block_count": 27}),
        "holds a model and its image encoder, as Ollama's files; give a conversion by llama.cpp",
    ),
    "Qwen3-Embedding": (
        lambda folder: family("qwen3", folder, {"pooling_type": 3}),
        "`qwen3.pooling_type` is 3: it is an embedding model; give a model that generates text",
    ),
    "Qwen3-Reranker": (
        lambda folder: family(
            "qwen3", folder, {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]}
        ),
        "`qwen3.pooling_type` is 4: it is a reranker",
    ),
    "encoder": (key("llama.attention.causal", False), "`llama.attention.causal` is False: it is an encoder"),
    "architecture": (
        lambda folder: header(folder, "eagle3", tokenizer__ggml__model="gpt2"),
        "architecture `eagle3` is not supported; supported are",
    ),
    "big-endian": (
        lambda folder: tiny(folder, order=GGUFEndian.BIG),
        "is big-endian; run `gguf-convert-endian FILE little`",
    ),
    "version 1": (
        lambda folder: with_bytes(tiny(folder), 4, struct.pack("<I", 1)),
        "its version is 1; download a newer conversion",
    ),
    "version 4": (lambda folder: with_bytes(tiny(folder), 4, struct.pack("<I", 4)), "its version is 4"),
    "GGML": (lambda folder: plain(folder, b"tjgg\3\0\0\0"), "the format before GGUF; download a GGUF file"),
    "pointer of Git LFS": (
        lambda folder: plain(folder, b"version https://git-lfs.github.com/spec/v1\n"),
        "is a pointer of Git LFS; fetch the file itself with `git lfs pull`",
    ),
    "web page": (lambda folder: plain(folder, b"<!doctype html>"), "is a web page; download the file itself"),
    "a part alone": (
        lambda folder: tiny(folder).rename(folder / "tiny-00001-of-00003.gguf"),
        "tiny-00002-of-00003.gguf: no such file",
    ),
    "OLMo 3 as OLMo 2": (
        lambda folder: family(
            "olmo2",
            folder,
            {"attention.sliding_window": 32, "attention.sliding_window_pattern": [True, False]},
        ),
        r"`olmo2.attention.sliding_window_pattern` is \[True, False\], which is not supported",
    ),
    "parts of two downloads": (
        lambda folder: tiny(folder, keys={"split.count": 1, "split.tensors.count": 5}),
        "its parts have .* tensors, .* and `split.tensors.count` is 5; download all parts again",
    ),
    "a count of tensors in words": (
        lambda folder: tiny(folder, keys={"split.count": 1, "split.tensors.count": "two\n" * 99}),
        r"`split.tensors.count` is 'two\\ntwo\\n",
    ),
    "Q4_0_4_4": (
        lambda folder: of_type(folder, 31),
        "`token_embd.weight` is of type Q4_0_4_4, which was removed; download Q4_0",
    ),
    "IQ4_NL_8_8": (lambda folder: of_type(folder, 38), "of type IQ4_NL_8_8, .*; download IQ4_NL"),
    "IQ4_K of another project": (
        lambda folder: of_type(folder, 139),
        "`token_embd.weight` is of type 139, which llama.cpp does not have",
    ),
    "integers": (
        lambda folder: tiny(folder, tensors={"output_norm.weight": np.ones(SPEC.hidden_size, np.int32)}),
        "`output_norm.weight` is of type I32, which cannot be read; download the model in another type",
    ),
    "layers of other heads": (
        key("llama.attention.head_count_kv", [2, 1, *[2] * (LAYERS - 2)]),
        "whose layers differ in `llama.attention.head_count_kv`",
    ),
    "layers of other features": (
        key("llama.feed_forward_length", [128] * (LAYERS - 1) + [64]),
        "whose layers differ in `llama.feed_forward_length`",
    ),
    "too few layers in a list": (
        key("llama.attention.head_count", [4] * (LAYERS + 1)),
        f"`llama.attention.head_count` has {LAYERS + 1} items for {LAYERS} layers",
    ),
    "value heads of another size": (key("llama.attention.value_length", 8), "a value head that differs"),
    "draft layers of other families": (
        lambda folder: family("qwen3-moe", folder, {"nextn_predict_layers": 1}),
        "`qwen3moe.nextn_predict_layers` is 1, which is not supported",
    ),
    "a draft model alone": (
        lambda folder: family(
            "qwen35", folder, {"nextn_predict_layers": 1}, without=names_of_layers("qwen35", folder, (0, 1))
        ),
        "a draft model alone is not supported",
    ),
    "rotation by other factors": (bent_factors, "`rope_freqs.weight` that does not follow Llama 3's rule"),
    "scaled queries": (
        key("llama.attention.temperature_scale", 0.1),
        "`llama.attention.temperature_scale` is 0.1.*, which is not supported",
    ),
    "another gating of experts": (
        lambda folder: family("qwen3-moe", folder, {"expert_gating_func": 2}),
        "`qwen3moe.expert_gating_func` is 2, which is not supported",
    ),
    "scales of NVFP4": (tensor("blk.0.ffn_down.scale", 1), "`blk.0.ffn_down.scale` belongs to no model"),
    "fused q, k and v": (
        tensor("blk.0.attn_qkv.weight", 4, SPEC.hidden_size),
        "`blk.0.attn_qkv.weight` belongs to no model",
    ),
    "no tokenizer": (without("tokenizer.ggml.model"), "has no tokenizer"),
    "no pre-tokenizer": (
        without("tokenizer.ggml.pre"),
        "has no `tokenizer.ggml.pre`, .*download a conversion",
    ),
    "another pre-tokenizer": (
        key("tokenizer.ggml.pre", "kimi-k2"),
        "pre-tokenizer `kimi-k2` is not supported; known are",
    ),
    "another tokenizer": (key("tokenizer.ggml.model", "rwkv"), "tokenizer model `rwkv` is not supported"),
    "no merges": (unmerged, "has no `tokenizer.ggml.merges`; download another conversion"),
    "more tokens than embeddings": (more_tokens_than_rows, "tokens, but embeddings of"),
    "types of too few tokens": (key("tokenizer.ggml.token_type", [1]), "`.*token_type` has 1 items for"),
    "separators": (key("tokenizer.ggml.add_sep_token", True), "`tokenizer.ggml.add_sep_token` is True"),
    "suppressed tokens": (
        key("tokenizer.ggml.suppress_tokens", [1]),
        r"`tokenizer.ggml.suppress_tokens` is \[1\], which is not supported",
    ),
}


@pytest.mark.parametrize("shape", REFUSED)
def test_what_cannot_be_built_is_refused_by_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """No weight is read, and the message is one sentence that names the file."""
    write, message = REFUSED[shape]
    path = write(tmp_path)
    for name in ("sha256_of", "read_blocks"):
        monkeypatch.setattr(f"shortfin_apps.llm.builder.sources.gguf_file.{name}", None)
    with pytest.raises(BuildError, match=message) as refused:
        look_at_gguf(path)
    assert str(refused.value).startswith(str(tmp_path))
    assert "\n" not in str(refused.value)
