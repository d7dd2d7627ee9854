"""Reads GGUF files with the `gguf` library, and bounds what it would do with a damaged file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType
from gguf.gguf_reader import ReaderField

from shortfin_apps.llm.builder.sources.base import Array
from shortfin_apps.llm.builder.sources.metadata_limits import (
    MAX_DIMENSIONS,
    MAX_ITEMS,
    MAX_KEYS,
    MAX_NAME_CHARS,
    MAX_TENSORS,
    MAX_TEXT_BYTES,
    check_at_most,
)
from shortfin_apps.llm.contract.errors import BuildError


class _CheckedReader(GGUFReader):
    """A reader that raises on reads past the end and on oversized metadata.

    The library would return empty arrays or loop over a huge count. It creates an array for each item, so
    metadata is limited by MAX_ITEMS and similar constants.
    """

    def __init__(self, path: Path) -> None:
        self._where = str(path)
        self._num_items = 0
        super().__init__(path)

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None) -> Array:
        if isinstance(self.data, np.memmap):
            # Slicing a memmap is several times slower than slicing a plain array over its memory.
            self.data = self.data.view(np.ndarray)  # type: ignore[assignment]
        if offset + int(count) * np.dtype(dtype).itemsize > self.data.nbytes:
            raise ValueError("it ends too early")
        return super()._get(offset, dtype, count, override_order)

    def _get_str(self, offset: int) -> tuple[Array, Array]:
        check_at_most(
            self._where, "a text has {} bytes", int(self._get(offset, np.uint64)[0]), MAX_TEXT_BYTES
        )
        return super()._get_str(offset)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Array], list[int], list[Any]]:
        if raw_type == GGUFValueType.ARRAY:
            self._num_items += int(self._get(orig_offs + np.dtype(np.uint32).itemsize, np.uint64)[0])
            check_at_most(self._where, "its arrays have {} items", self._num_items, MAX_ITEMS)
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_fields(self, offs: int, count: int) -> int:
        check_at_most(self._where, "it has {} keys", int(count), MAX_KEYS)
        return super()._build_fields(offs, count)

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[ReaderField]]:
        check_at_most(self._where, "it has {} tensors", int(count), MAX_TENSORS)
        return super()._build_tensor_info(offs, count)

    def _get_tensor_info_field(self, orig_offs: int) -> ReaderField:
        num_bytes = int(self._get(orig_offs, np.uint64)[0])
        check_at_most(self._where, "a tensor's name has {} bytes", num_bytes, MAX_NAME_CHARS)
        num_dims = int(self._get(orig_offs + np.dtype(np.uint64).itemsize + num_bytes, np.uint32)[0])
        check_at_most(self._where, "a tensor has {} dimensions", num_dims, MAX_DIMENSIONS)
        return super()._get_tensor_info_field(orig_offs)


def read_gguf(path: Path) -> GGUFReader:
    try:
        with np.errstate(all="ignore"):
            return _CheckedReader(path)
    except FileNotFoundError:
        raise BuildError(f"{path}: no such file") from None
    except BuildError:
        raise
    except Exception as error:  # the reader does not validate, so a damaged file can raise anything
        raise BuildError(f"{path}: not a readable GGUF file ({error})") from error


def check_parts(paths: list[Path], readers: list[GGUFReader]) -> None:
    """Raise BuildError if a file's metadata contradicts the part number in its name."""
    for number, (path, reader) in enumerate(zip(paths, readers, strict=True)):
        keys = {"split.no": 0, "split.count": 1} | metadata_of(str(path), reader)
        for key in ("split.no", "split.count"):
            if type(keys[key]) is not int:
                raise BuildError(f"{path}: `{key}` is not a whole number; download the model again")
        found = keys["split.no"], max(1, keys["split.count"])
        if found != (number, len(paths)):
            named = f"{number + 1} of {len(paths)}"
            raise BuildError(f"{path}: is part {found[0] + 1} of {found[1]}, not {named} as in its name")


def metadata_of(where: str, reader: GGUFReader) -> dict[str, Any]:
    try:
        return {key: value.contents() for key, value in reader.fields.items()}
    except Exception as error:  # as above
        raise BuildError(f"{where}: not a readable GGUF file ({error})") from error
