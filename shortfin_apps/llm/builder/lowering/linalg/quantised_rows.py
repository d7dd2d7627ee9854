"""Cache rows of a q8_0 cache: the i8 elements of all K/V heads, an f32 scale per head, then padding.

A byte is the element divided by the head's scale, rounded to even. The scale is the head's largest magnitude
/ 127. Magnitudes are compared as integers, which order as floats do and put NaN last; a head that contains
NaN gets a scale of NaN and reads as all NaN. The remainder of a row is padding.
"""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.contract.config import SCALE_BYTES

_LARGER_MAGNITUDE = """\
  %no_sign = arith.constant 0x7FFFFFFF : i32
  %bits = arith.bitcast %a : f32 to i32
  %magnitude = arith.andi %bits, %no_sign : i32
  %larger = arith.maxui %magnitude, %out : i32
  linalg.yield %larger : i32"""


def quantised_rows(e: Emitter, x: Tensor, kv_heads: int, row_bytes: int) -> Tensor:
    """Quantise x [tokens, kv_heads * head_dim] f32 to rows [tokens, row_bytes] i8."""
    tokens, values = x.shape
    assert isinstance(values, int)
    # Reshaped into a separate tensor: in this body, IREE 3.9 reads a slice of qkv at wrong offsets.
    heads = e.reshape(x, (tokens, kv_heads, values // kv_heads))
    none = e.fill("0", (tokens, kv_heads), "i32")
    largest = e.elementwise("thd", ("th", none.shape, "i32"), [(heads, "thd")], _LARGER_MAGNITUDE, none)
    body = f"""\
  %t = linalg.index 0 : index
  %at = linalg.index 1 : index
  %head_dim = arith.constant {values // kv_heads} : index
  %values = arith.constant {values} : index
  %last_value = arith.constant {values - 1} : index
  %last_head = arith.constant {kv_heads - 1} : index
  %scale_bytes = arith.constant {SCALE_BYTES} : index
  %byte_bits = arith.constant 8 : i32
  %most = arith.constant 127.0 : f32
  // 1.5 * 2^23: what is added to it is rounded to an integer, whose lowest byte is the sum's.
  %to_integer = arith.constant 12582912.0 : f32
  %is_value = arith.cmpi ult, %at, %values : index
  %column = arith.minui %at, %last_value : index
  %of_value = arith.divui %column, %head_dim : index
  %in_head = arith.remui %column, %head_dim : index
  %scale_byte = arith.subi %at, %values : index
  %scale_of = arith.divui %scale_byte, %scale_bytes : index
  %wanted = arith.select %is_value, %of_value, %scale_of : index
  %head = arith.minui %wanted, %last_head : index
  %bits = tensor.extract {largest.name}[%t, %head] : {largest.type}
  %magnitude = arith.bitcast %bits : i32 to f32
  %scale = arith.divf %magnitude, %most : f32
  %element = tensor.extract {heads.name}[%t, %of_value, %in_head] : {heads.type}
  %scaled = arith.divf %element, %scale : f32
  %rounded = arith.addf %scaled, %to_integer : f32
  %quant = arith.bitcast %rounded : f32 to i32
  %place = arith.remui %scale_byte, %scale_bytes : index
  %place.i32 = arith.index_cast %place : index to i32
  %shift = arith.muli %place.i32, %byte_bits : i32
  %scale_bits = arith.bitcast %scale : f32 to i32
  %shifted = arith.shrui %scale_bits, %shift : i32
  %word = arith.select %is_value, %quant, %shifted : i32
  %byte = arith.trunci %word : i32 to i8
  linalg.yield %byte : i8"""
    return e.elementwise("td", ("td", (tokens, row_bytes), "i8"), [], body)


def scales_of(e: Emitter, rows: Tensor) -> Tensor:
    """Return `rows` [rows, row_bytes] i8 viewed as [rows, row_bytes / 4] f32, to read scales."""
    count, row_bytes = rows.shape
    assert isinstance(row_bytes, int)
    scales = Tensor(e.fresh(), (count, row_bytes // SCALE_BYTES), "f32")
    e.line(f"{scales.name} = flow.tensor.bitcast {rows.name} : {rows.sized_type} -> {scales.sized_type}")
    return scales


def dequantise(result: str, byte: str, scale: str) -> str:
    """Return MLIR that sets `result` f32 to the i8 `byte` times the f32 `scale`."""
    name = result.removeprefix("%")
    return f"""\
  %{name}.quant = arith.sitofp {byte} : i8 to f32
  {result} = arith.mulf %{name}.quant, {scale} : f32"""
