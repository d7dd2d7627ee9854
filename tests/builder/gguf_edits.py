"""GGUF files with the metadata and tensors of another file, some of them changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import (
    GGMLQuantizationType,
    GGUFEndian,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    ReaderTensor,
    TokenType,
)

from tests.builder.golden_families import GoldenFamily
from tests.builder.model_files import SPEC, write_gguf

Array = npt.NDArray[Any]
EMBEDDINGS = ("token_embd.weight", "output.weight")
Stored = tuple[Array, GGMLQuantizationType]  # the values as they are stored, and their type


def edited(
    path: Path,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array | Stored] | None = None,
    without: Collection[str] = (),
    *,
    architecture: str = "llama",
    alignment: int | None = None,
    order: GGUFEndian = GGUFEndian.LITTLE,
) -> Path:
    """Replace a file by one with `keys` and `tensors` added or replaced, without the names in `without`."""
    reader = GGUFReader(path)
    fields = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    kept = {name: _Value(f.contents(), f.types) for name, f in fields.items()}
    values = {**kept, **{name: _Value(value) for name, value in (keys or {}).items()}}
    stored = {tensor.name: _stored(tensor) for tensor in reader.tensors} | dict(tensors or {})
    changed = path.with_suffix(".changed")
    writer = GGUFWriter(changed, architecture, endianess=order)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for name, value in values.items():
        if name not in {"general.architecture", *without}:
            writer.add_key_value(name, value.value, value.kind, value.of_items)
    for name, tensor in stored.items():
        if name not in without:
            array, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
            writer.add_tensor(name, array, raw_dtype=kind)
    _write(writer)
    return changed.replace(path)


def write_keys(path: Path, architecture: str, keys: Mapping[str, Any]) -> Path:
    """Write a file with metadata only; an empty `architecture` is left out."""
    writer = GGUFWriter(path, architecture)
    if not architecture:
        writer.kv_data[0].pop("general.architecture", None)
    for name, value in keys.items():
        made = _Value(value)
        writer.add_key_value(name, made.value, made.kind, made.of_items)
    _write(writer)
    return path


def tiny(folder: Path, **changes: Any) -> Path:
    """A Llama with changes, as `edited` takes them."""
    return edited(write_gguf(folder / "tiny.gguf"), **changes)


def family(name: str, folder: Path, keys: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """A golden family with changes; `keys` are without the prefix of the architecture."""
    path = GoldenFamily.of(name).write_gguf(folder / "model.gguf")
    architecture = str(GGUFReader(path).fields["general.architecture"].contents())
    named = {f"{architecture}.{key}": value for key, value in (keys or {}).items()}
    return edited(path, named, architecture=architecture, **changes)


def with_bytes(path: Path, at: int, content: bytes) -> Path:
    """The file with `content` at the byte `at`."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)
    return path


def tokens_of(path: Path) -> dict[str, Any]:
    """The vocabulary of a file as keys that `edited` takes."""
    fields = GGUFReader(path).fields
    return {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type")}


def with_tokens(folder: Path, added: Mapping[str, TokenType], **keys: Any) -> Path:
    """A file with more tokens, and an embedding for each and 3 more."""
    path = write_gguf(folder / "tiny.gguf")
    own = tokens_of(path)
    lists = {
        "tokenizer.ggml.tokens": [*own["tokens"], *added],
        "tokenizer.ggml.token_type": [*own["token_type"], *map(int, added.values())],
    }
    rows = len(own["tokens"]) + len(added) + 3
    tensors = {name: np.ones((rows, SPEC.hidden_size), np.float32) for name in EMBEDDINGS}
    return edited(path, {**lists, **{f"tokenizer.{k}": v for k, v in keys.items()}}, tensors)


def _write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(tensor: ReaderTensor) -> Stored:
    return np.array(tensor.data), tensor.tensor_type


class _Value:
    """A value with its type: that of the file, or what Python's type says."""

    def __init__(self, value: Any, types: Collection[GGUFValueType] = ()) -> None:
        self.value = value
        self.kind, *of_items = types or self._types(value)
        self.of_items = of_items[-1] if of_items else None

    @staticmethod
    def _types(value: Any) -> list[GGUFValueType]:
        kind = GGUFValueType.get_type(value)
        kind = GGUFValueType.UINT32 if kind is GGUFValueType.INT32 and value >= 0 else kind
        return [kind, GGUFValueType.get_type(value[0])] if kind is GGUFValueType.ARRAY else [kind]
