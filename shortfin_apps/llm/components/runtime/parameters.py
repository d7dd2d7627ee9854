"""Reads and checks parameter files (.irpa, .gguf, .safetensors) for the runtimes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.runtime.memory import empty_bytes
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.irpa import check_archive

EMBEDDINGS = ("token_embd.weight", "model.embed_tokens.weight")  # of GGUF and Hugging Face models


def open_parameters(paths: Sequence[Path]) -> Any:
    """Open all files as one memory-mapped iree.runtime.ParameterIndex. Raises ArtifactError.

    Truncated files are refused, because reading a mapped page after the end of a file kills the process.
    """
    import iree.runtime as iree

    index = iree.ParameterIndex()
    for path in paths:
        first = len(index)
        try:
            size = path.stat().st_size
            check_archive(path)
            index.load(str(path))
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from None
        except Exception as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ArtifactError(f"{path}: not a usable parameter file ({reason})") from None
        _check_extents(path, size, [index[i] for i in range(first, len(index))])
    return index


def read_parameters(paths: Sequence[Path]) -> Any:
    """Do the same as `open_parameters`, but read the files into memory with huge pages, without mapping."""
    import iree.runtime as iree

    index = iree.ParameterIndex()
    for path in paths:
        mapped, content = open_parameters([path]), _read(path)

        def add(entry: Any, content: npt.NDArray[np.uint8] = content) -> None:
            offset = entry.file_storage[1]
            index.add_buffer(entry.key, content[offset : offset + entry.length])

        _copy_entries(mapped, index, add)
    return index


def stream_parameters(paths: Sequence[Path]) -> Any:
    """Do the same as `open_parameters`, but have the device read the files once, without mapping.

    From a mapped file, IREE's HIP driver copies too, but it asks to lock all of the mapping's pages in memory
    for as long as the program is loaded, so that the weights of an APU would take twice their size.
    """
    import iree.runtime as iree

    index = iree.ParameterIndex()
    for path in paths:
        mapped = open_parameters([path])
        try:
            with path.open("rb", buffering=0) as file:
                handle = iree.FileHandle.wrap_fd(file.fileno())  # has a descriptor of its own
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from None

        def add(entry: Any, handle: Any = handle) -> None:
            index.add_from_file_handle(entry.key, handle, entry.length, entry.file_storage[1])

        _copy_entries(mapped, index, add)
    return index


def _copy_entries(source: Any, target: Any, add_of_file: Callable[[Any], None]) -> None:
    """Add the entries of one ParameterIndex to another; `add_of_file` adds the entries that are in a file."""
    for entry in (source[i] for i in range(len(source))):
        if entry.is_file:
            add_of_file(entry)
        else:
            target.add_splat(entry.key, entry.splat_pattern, entry.length)


def _read(path: Path) -> npt.NDArray[np.uint8]:
    try:
        with path.open("rb", buffering=0) as file:
            content = empty_bytes(path.stat().st_size)
            rest = content.data
            while rest and (count := file.readinto(rest)):
                rest = rest[count:]
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from None
    return content


def parameter_bytes(paths: Sequence[Path]) -> dict[str, int]:
    """Return the size of every parameter in bytes, by name. Raises ArtifactError."""
    index = open_parameters(paths)
    return {entry.key: entry.length for entry in (index[i] for i in range(len(index)))}


def embedding_rows(paths: Sequence[Path]) -> int | None:
    """Return the model's vocabulary size, or None if the files do not contain it. Raises ArtifactError.

    Archives of amdsharktank contain the size: each tensor's metadata has the tensor's shape, as JSON after a
    format tag (`_make_tensor_metadata` in iree.turbine.aot.params and in iree.runtime). Other files have no
    such metadata.
    """
    index = open_parameters(paths)
    for entry in (index[i] for i in range(len(index))):
        if entry.key in EMBEDDINGS and (rows := _rows(bytes(entry.metadata))) is not None:
            return rows
    return None


def _rows(metadata: bytes) -> int | None:
    try:
        shape = json.loads(metadata.partition(b":")[2])["shape"]
        rows = shape[0] if len(shape) == 2 else None
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    return rows if isinstance(rows, int) and not isinstance(rows, bool) and rows > 0 else None


def _check_extents(path: Path, size: int, entries: Sequence[Any]) -> None:
    for entry in entries:
        if entry.is_file and entry.file_storage[1] + entry.length > size:
            raise ArtifactError(
                f"{path}: the file is cut short (parameter {entry.key!r} ends at byte "
                f"{entry.file_storage[1] + entry.length} of {size}); copy or build it again"
            )
