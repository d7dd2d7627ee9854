"""Parses `iree.abi.declaration`, the reflection attribute that declares an exported function.

IREE's importers write the attribute in this form (compiler/Bindings/Native/Transforms/WrapEntryPoints.cpp):

    async func @decode_bs8(%tokens: tensor<8x1xi64>, ...) -> (%output0: tensor<8x64xf32>, ...)

with `sync` instead of `async` for functions without fences, and optional `{attributes}` after a type. The
function's name is ignored, because the export already has it.
"""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np

from shortfin_apps.llm.components.runtime.device import TensorType

MLIR_DTYPES: dict[str, np.dtype[Any]] = {
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f8E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
}


Types = tuple[TensorType, ...]

_FUNCTION = re.compile(r"\s*(?:sync|async)\s+func\s+@[^\s(]+\s*\((.*)\)\s*->\s*\((.*)\)\s*", re.DOTALL)
_VALUE = re.compile(r"\s*%[\w.$-]+\s*:\s*tensor<([^<>]*)>\s*(?:\{.*\})?\s*", re.DOTALL)
_OPENING = "(<{["
_CLOSING = ")>}]"


def parse_declaration(text: str) -> tuple[Types, Types] | None:
    """Return the types of arguments and results, or None if `text` has another form or other types.

    Only tensor types are parsed. Frontends may write any text into the attribute.
    """
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return None
    arguments = _parse_values(function[1])
    results = _parse_values(function[2])
    return None if arguments is None or results is None else (arguments, results)


def format_type(tensor: TensorType) -> str:
    """Return the type in MLIR's syntax, e.g. `tensor<8x?xi64>`."""
    names = {dtype: name for name, dtype in MLIR_DTYPES.items()}
    dims = "".join("?x" if dim is None else f"{dim}x" for dim in tensor.shape)
    return f"tensor<{dims}{names[tensor.dtype]}>"


def _parse_values(text: str) -> Types | None:
    types = [_parse_value(part) for part in _split(text)]
    return tuple(t for t in types if t is not None) if None not in types else None


def _parse_value(text: str) -> TensorType | None:
    value = _VALUE.fullmatch(text)
    if value is None:
        return None
    *dims, element = value[1].split("x")
    if element not in MLIR_DTYPES or not all(dim == "?" or dim.isdigit() for dim in dims):
        return None
    return TensorType(tuple(None if dim == "?" else int(dim) for dim in dims), MLIR_DTYPES[element])


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets: types inside of attributes may contain commas."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        # The `>` of `->` inside an attribute is not a closing bracket.
        closes = char in _CLOSING and not (char == ">" and text[position - 1 : position] == "-")
        depth += (char in _OPENING) - closes
        if char == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    last = text[start:]
    return [*parts, last] if parts or last.strip() else []
