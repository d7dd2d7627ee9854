"""Kernels of AMX on CPUs without it: tile registers in memory, and functions in place of their instructions.

The rest of such a kernel is AVX-512, with bf16 where it converts to that. A thread at a time may run one.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.builder.target import Target
from tests.builder.compiled_kernels import NO_TILES, Load, cpu_or_skip, load
from tests.builder.compiled_model import HOST

# This CPU as if it had AMX, for kernels that `load_emulated` compiles.
EMULATED = replace(NO_TILES, features=NO_TILES.features | {"amx-tile", "amx-bf16", "amx-fp16", "amx-int8"})
_INSTRUCTION = re.compile(
    r'llvm\.call_intrinsic "llvm\.x86\.(ldtilecfg|tile(?:loadd|loaddt1|stored)64|tile[zr]\w+|tdp\w+)"'
)
_MODULE = re.compile(r"^builtin\.module \{$", re.MULTILINE)
# LDTILECFG's operand (Intel's Software Developer's Manual, volume 2), whose byte 48 + n says how many rows
# tile n has, and byte 16 + 2 n how many bytes in each; and behind it eight tiles of 1 KiB.
_STATE = """
llvm.mlir.global internal @tile_state(dense<0> : tensor<8256xi8>) {alignment = 64 : i64}
    : !llvm.array<8256 x i8>
func.func private @tile_rows(%tile: i8) -> i64 {
  %state = llvm.mlir.addressof @tile_state : !llvm.ptr
  %n = arith.extui %tile : i8 to i64
  %rows.at = llvm.getelementptr %state[%n] : (!llvm.ptr, i64) -> !llvm.ptr, i8
  %at = llvm.getelementptr %rows.at[48] : (!llvm.ptr) -> !llvm.ptr, i8
  %rows.i8 = llvm.load %at : !llvm.ptr -> i8
  %rows = arith.extui %rows.i8 : i8 to i64
  return %rows : i64
}
func.func private @tile_words(%tile: i8) -> i64 {
  %state = llvm.mlir.addressof @tile_state : !llvm.ptr
  %n = arith.extui %tile : i8 to i64
  %bytes.at = llvm.getelementptr %state[%n] : (!llvm.ptr, i64) -> !llvm.ptr, i16
  %at = llvm.getelementptr %bytes.at[16] : (!llvm.ptr) -> !llvm.ptr, i8
  %bytes.i16 = llvm.load %at : !llvm.ptr -> i16
  %bytes = arith.extui %bytes.i16 : i16 to i64
  %c4 = arith.constant 4 : i64
  %words = arith.divui %bytes, %c4 : i64
  return %words : i64
}
func.func private @tile_row(%tile: i8, %row: i64) -> !llvm.ptr {
  %state = llvm.mlir.addressof @tile_state : !llvm.ptr
  %c16 = arith.constant 16 : i64
  %n = arith.extui %tile : i8 to i64
  %first = arith.muli %n, %c16 : i64
  %line = arith.addi %first, %row : i64
  %line.at = llvm.getelementptr %state[%line] : (!llvm.ptr, i64) -> !llvm.ptr, !llvm.array<64 x i8>
  %at = llvm.getelementptr %line.at[64] : (!llvm.ptr) -> !llvm.ptr, i8
  return %at : !llvm.ptr
}
func.func private @emulated_tilezero(%tile: i8) {
  %c0 = arith.constant 0 : i64
  %c1 = arith.constant 1 : i64
  %c16 = arith.constant 16 : i64
  %none = arith.constant dense<0> : vector<16xi32>
  scf.for %row = %c0 to %c16 step %c1 : i64 {
    %to = func.call @tile_row(%tile, %row) : (i8, i64) -> !llvm.ptr
    llvm.store %none, %to : vector<16xi32>, !llvm.ptr
  }
  return
}
func.func private @emulated_tilerelease() {
  %c0 = arith.constant 0 : i8
  %c1 = arith.constant 1 : i8
  %c8 = arith.constant 8 : i8
  %state = llvm.mlir.addressof @tile_state : !llvm.ptr
  %none = arith.constant dense<0> : vector<16xi32>
  llvm.store %none, %state : vector<16xi32>, !llvm.ptr
  scf.for %tile = %c0 to %c8 step %c1 : i8 {
    func.call @emulated_tilezero(%tile) : (i8) -> ()
  }
  return
}
func.func private @emulated_ldtilecfg(%config: !llvm.ptr) {
  func.call @emulated_tilerelease() : () -> ()
  %state = llvm.mlir.addressof @tile_state : !llvm.ptr
  %shapes = llvm.load %config : !llvm.ptr -> vector<64xi8>
  llvm.store %shapes, %state : vector<64xi8>, !llvm.ptr
  return
}
"""
_MOVE = """
func.func private @emulated_{name}(%tile: i8, %memory: !llvm.ptr, %stride: i64) {{
  %c0 = arith.constant 0 : i64
  %c1 = arith.constant 1 : i64
  {prepare}
  %rows = func.call @tile_rows(%tile) : (i8) -> i64
  %words = func.call @tile_words(%tile) : (i8) -> i64
  scf.for %row = %c0 to %rows step %c1 : i64 {{
    %offset = arith.muli %row, %stride : i64
    %outside = llvm.getelementptr %memory[%offset] : (!llvm.ptr, i64) -> !llvm.ptr, i8
    %inside = func.call @tile_row(%tile, %row) : (i8, i64) -> !llvm.ptr
    scf.for %word = %c0 to %words step %c1 : i64 {{
      %from = llvm.getelementptr {source}[%word] : (!llvm.ptr, i64) -> !llvm.ptr, i32
      %to = llvm.getelementptr {target}[%word] : (!llvm.ptr, i64) -> !llvm.ptr, i32
      %value = llvm.load %from : !llvm.ptr -> i32
      llvm.store %value, %to : i32, !llvm.ptr
    }}
  }}
  return
}}
"""
# Rows of B and of the sum have 64 bytes.
_MULTIPLY = """
func.func private @emulated_{name}(%sum: i8, %a: i8, %b: i8) {{
  %c0 = arith.constant 0 : i64
  %c1 = arith.constant 1 : i64
  %rows = func.call @tile_rows(%sum) : (i8) -> i64
  %words = func.call @tile_words(%a) : (i8) -> i64
  scf.for %row = %c0 to %rows step %c1 : i64 {{
    %a.row = func.call @tile_row(%a, %row) : (i8, i64) -> !llvm.ptr
    %sum.row = func.call @tile_row(%sum, %row) : (i8, i64) -> !llvm.ptr
    %before = llvm.load %sum.row : !llvm.ptr -> vector<16x{wide}>
    %after = scf.for %word = %c0 to %words step %c1 iter_args(%sum0 = %before) -> (vector<16x{wide}>) : i64 {{
      %a.at = llvm.getelementptr %a.row[%word] : (!llvm.ptr, i64) -> !llvm.ptr, i32
      %a.word = llvm.load %a.at : !llvm.ptr -> i32
      %a.words = vector.broadcast %a.word : i32 to vector<16xi32>
      %a.all = vector.bitcast %a.words : vector<16xi32> to vector<{lanes}x{narrow}>
      %b.at = func.call @tile_row(%b, %word) : (i8, i64) -> !llvm.ptr
      %b.all = llvm.load %b.at : !llvm.ptr -> vector<{lanes}x{narrow}>
{steps}
      scf.yield %sum{count} : vector<16x{wide}>
    }}
    llvm.store %after, %sum.row : vector<16x{wide}>, !llvm.ptr
  }}
  return
}}
"""


def emulate(text: str) -> str:
    """The module `text` with functions in place of AMX's instructions."""
    return _MODULE.sub(
        lambda found: f"{found[0]}{_functions()}", _INSTRUCTION.sub(r"func.call @emulated_\1", text)
    )


def load_emulated(text: str, folder: Path) -> Any:
    """As `load`, of kernels for EMULATED."""
    return load(emulate(text), folder)


def has_the_rest() -> bool:
    """Whether this CPU runs the rest of such kernels."""
    return HOST.has_bf16_dot and HOST.has_int8_dot


def target_and_load(cpu: str) -> tuple[Target, Load]:
    """One of CPUS or "emulated-amx", and what loads kernels for it; skips the test where this CPU is none."""
    if cpu != "emulated-amx":
        return cpu_or_skip(cpu), load
    if not has_the_rest():
        pytest.skip("this CPU has no AVX-512 with bf16")
    return EMULATED, load_emulated


def _functions() -> str:
    zeros = "func.call @emulated_tilezero(%tile) : (i8) -> ()"  # of rows that are not loaded
    loads = [
        _MOVE.format(name=name, prepare=zeros, source="%outside", target="%inside")
        for name in ("tileloadd64", "tileloaddt164")
    ]
    store = _MOVE.format(name="tilestored64", prepare="", source="%inside", target="%outside")
    products = [
        _multiply("tdpbf16ps", "bf16", "f32"),
        _multiply("tdpfp16ps", "f16", "f32"),
        _multiply("tdpbssd", "i8", "i32"),
        _multiply("tdpbsud", "i8", "i32", b_widens="arith.extui"),
    ]
    return "".join([_STATE, *loads, store, *products])


def _multiply(name: str, narrow: str, wide: str, b_widens: str | None = None) -> str:
    """A function that sums `wide` products of `narrow`, as many as a word has for each column."""
    count = 4 if narrow == "i8" else 2
    a_widens = "arith.extsi" if wide == "i32" else "arith.extf"
    widens = {"a": a_widens, "b": b_widens or a_widens}
    steps = "\n".join(_step(part, count, narrow, wide, widens) for part in range(count))
    return _MULTIPLY.format(name=name, narrow=narrow, wide=wide, lanes=16 * count, count=count, steps=steps)


def _step(part: int, count: int, narrow: str, wide: str, widens: dict[str, str]) -> str:
    """%sumPART + 1 = %sumPART + the products of one of a word's elements."""
    lanes = ", ".join(str(lane) for lane in range(part, 16 * count, count))
    whole, vec = f"vector<{16 * count}x{narrow}>", f"vector<16x{wide}>"
    lines = []
    for name, widen in widens.items():
        own = f"%{name}{part}"
        lines.append(f"{own}.narrow = vector.shuffle %{name}.all, %{name}.all [{lanes}] : {whole}, {whole}")
        lines.append(f"{own} = {widen} {own}.narrow : vector<16x{narrow}> to {vec}")
    if wide == "i32":
        lines.append(f"%product{part} = arith.muli %a{part}, %b{part} : {vec}")
        lines.append(f"%sum{part + 1} = arith.addi %sum{part}, %product{part} : {vec}")
    else:
        lines.append(f"%sum{part + 1} = vector.fma %a{part}, %b{part}, %sum{part} : {vec}")
    return "\n".join(f"      {line}" for line in lines)
