"""Rotary position embedding: cosines and sines of every token of an invocation, once for all layers.

cos and sin of position * frequency come from two small tables by the addition theorem: position =
STEP * i + j, one table for STEP * i and one for j. So they are as exact at position 100,000 as at 1 (f32
products of large positions are not), and cost four multiplications and no transcendental function.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor, dense, tensor_type
from shortfin_apps.llm.builder.model.spec import ModelSpec

STEP = 64


def rotary_frequencies(spec: ModelSpec) -> npt.NDArray[np.float64]:
    """Radians per position, [head_dim / 2] f64, after the model's scaling if it has one."""
    exponent = np.arange(0, spec.head_dim, 2, dtype=np.float64) / spec.head_dim
    frequencies = spec.rope_theta**-exponent
    scaling = spec.rope_scaling
    return frequencies if scaling is None else scaling.scaled(frequencies, spec.rope_theta)


class Rotary:
    """The tables for positions below `context_length` (positions past it repeat the last STEP)."""

    def __init__(self, spec: ModelSpec, context_length: int) -> None:
        frequencies = rotary_frequencies(spec)
        self._half = spec.head_dim // 2
        magnitude = spec.rope_scaling.magnitude if spec.rope_scaling else 1.0
        # In one of the tables, as each value is a product of both.
        self._coarse = _table(np.arange(-(-context_length // STEP)) * STEP, frequencies, magnitude)
        self._fine = _table(np.arange(STEP), frequencies)

    def declarations(self) -> list[str]:
        tables = {"rotary.coarse": self._coarse, "rotary.fine": self._fine}
        return [f'util.global private @"{name}" = {dense(table)}' for name, table in tables.items()]

    def load(self, e: Emitter) -> tuple[Tensor, Tensor]:
        """The tables of multiples of STEP and of positions below it: [positions, 2, head_dim / 2] f32."""
        coarse = e.load("rotary.coarse", self._coarse.shape, "f32")
        return coarse, e.load("rotary.fine", self._fine.shape, "f32")

    def emit(self, e: Emitter, positions: Tensor) -> Tensor:
        """[tokens] i64 -> [tokens, 2, head_dim / 2] f32: cosines, sines."""
        coarse, fine = self.load(e)
        step, last = e.constant(STEP), e.constant(len(self._coarse) - 1)
        c0, c1 = e.constant(0), e.constant(1)
        coarse_type, fine_type = (tensor_type(t.shape, "f32") for t in (coarse, fine))
        shape = (*positions.shape, 2, self._half)
        body = f"""\
  %which = linalg.index 1 : index
  %d = linalg.index 2 : index
  %position = arith.index_cast %a : i64 to index
  %quotient = arith.divui %position, {step} : index
  %i = arith.minui %quotient, {last} : index
  %j = arith.remui %position, {step} : index
  %ci = tensor.extract {coarse.name}[%i, {c0}, %d] : {coarse_type}
  %si = tensor.extract {coarse.name}[%i, {c1}, %d] : {coarse_type}
  %cj = tensor.extract {fine.name}[%j, {c0}, %d] : {fine_type}
  %sj = tensor.extract {fine.name}[%j, {c1}, %d] : {fine_type}
  %cc = arith.mulf %ci, %cj : f32
  %ss = arith.mulf %si, %sj : f32
  %cosine = arith.subf %cc, %ss : f32
  %sc = arith.mulf %si, %cj : f32
  %cs = arith.mulf %ci, %sj : f32
  %sine = arith.addf %sc, %cs : f32
  %is_cosine = arith.cmpi eq, %which, {c0} : index
  %value = arith.select %is_cosine, %cosine, %sine : f32
  linalg.yield %value : f32"""
        return e.elementwise("tud", ("tud", shape, "f32"), [(positions, "t")], body)


def _table(
    positions: npt.NDArray[np.int64], frequencies: npt.NDArray[np.float64], magnitude: float = 1.0
) -> npt.NDArray[np.float32]:
    """[positions, 2, head_dim / 2]: cosines, sines, times `magnitude`."""
    angles = positions[:, None] * frequencies
    return (magnitude * np.stack([np.cos(angles), np.sin(angles)], axis=1)).astype(np.float32)
