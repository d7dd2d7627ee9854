"""Read 8-bit float tensors from safetensors files, which the library cannot convert to numpy arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

FP8_TYPES = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_SIZE_BYTES = 8


def read_fp8(path: Path, name: str) -> npt.NDArray[Any]:
    """Read tensor `name` of a file already opened by safetensors, so its header is valid. Raises OSError."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_SIZE_BYTES), "little")
        entry = json.loads(file.read(header_bytes))[name]
    dtype, start = FP8_TYPES[entry["dtype"]], entry["data_offsets"][0]
    offset, shape = _SIZE_BYTES + header_bytes + start, tuple(entry["shape"])
    count = int(np.prod(shape))
    return np.fromfile(path, dtype, count, offset=offset).reshape(shape)
