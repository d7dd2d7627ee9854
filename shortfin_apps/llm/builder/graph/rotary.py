"""RoPE: cosines and sines of every token of an invocation, computed once for all layers.

The cosine and sine of position * frequency are computed from two small tables with the angle addition
formulas: position = STEP * i + j, with one table for STEP * i and one for j. Results are as exact at
position 100,000 as at 1 (f32 products with large positions are not), and cost four multiplications and no
transcendental function.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor, dense, tensor_type
from shortfin_apps.llm.model.rope import Rope, Rotation

STEP = 64


def rotary_frequencies(rotation: Rotation, context_length: int) -> npt.NDArray[np.float64]:
    """Return the frequencies in radians per position, [head_dim / 2] f64, after RoPE scaling.

    The frequency of elements that do not rotate is 0.
    """
    rope, rotated = rotation.rope or Rope(), rotation.rotated
    frequencies = rope.theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    if rope.scaling is not None:
        frequencies = rope.scaling.scaled(frequencies, rope.theta, context_length)
    return np.pad(frequencies, (0, (rotation.head_dim - rotated) // 2))


def rotary_magnitudes(rotation: Rotation) -> npt.NDArray[np.float64]:
    """Return the factors [head_dim / 2] f64 of the cosines and sines: RoPE scaling and the scale of scores.

    q and k are both multiplied by these factors, which therefore contain the square root of the scale of
    scores.
    """
    rotated, scaling = rotation.rotated, rotation.rope and rotation.rope.scaling
    scaled = scaling.magnitude if scaling else 1.0
    factors = np.repeat([scaled, 1.0], [rotated // 2, (rotation.head_dim - rotated) // 2])
    magnitudes: npt.NDArray[np.float64] = factors * np.sqrt(rotation.score_scale)
    return magnitudes


class Rotary:
    """The cosine and sine tables of a rotation, for positions below `context_length`.

    Later positions get values of the last STEP positions in the tables.
    """

    def __init__(self, rotation: Rotation, context_length: int) -> None:
        assert rotation.rope is not None
        frequencies = rotary_frequencies(rotation, context_length)
        magnitudes = rotary_magnitudes(rotation)
        self._name = f"rotary.{rotation.rope.name}"
        self._half = rotation.head_dim // 2
        # Only one table contains the magnitudes, as each result is a product of values of both tables.
        self._coarse = _table(np.arange(-(-context_length // STEP)) * STEP, frequencies, magnitudes)
        self._fine = _table(np.arange(STEP), frequencies, np.ones(self._half))

    def declarations(self) -> list[str]:
        tables = {"coarse": self._coarse, "fine": self._fine}
        return [f'util.global private @"{self._name}.{n}" = {dense(table)}' for n, table in tables.items()]

    def load(self, e: Emitter) -> tuple[Tensor, Tensor]:
        """Load the coarse table, of multiples of STEP, and the fine table, of positions below STEP.

        Each is [positions, 2, head_dim / 2] f32: cosines and sines.
        """
        coarse = e.load(f"{self._name}.coarse", self._coarse.shape, "f32")
        return coarse, e.load(f"{self._name}.fine", self._fine.shape, "f32")

    def emit(self, e: Emitter, positions: Tensor) -> Tensor:
        """Emit the cosines and sines of `positions` [tokens] i64, as [tokens, 2, head_dim / 2] f32."""
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


def emit_unrotated(e: Emitter, rotation: Rotation, tokens: Dim) -> Tensor:
    """Emit the cosines and sines for layers that do not rotate, in the shape of `Rotary.emit`.

    Sines are 0, and cosines the square root of the scale of scores.
    """
    body = f"""\
  %c0 = arith.constant 0 : index
  %which = linalg.index 1 : index
  %one = arith.constant {float(np.sqrt(rotation.score_scale)):.9e} : f32
  %zero = arith.constant 0.0 : f32
  %is_cosine = arith.cmpi eq, %which, %c0 : index
  %value = arith.select %is_cosine, %one, %zero : f32
  linalg.yield %value : f32"""
    return e.elementwise("tud", ("tud", (tokens, 2, rotation.head_dim // 2), "f32"), [], body)


def _table(
    positions: npt.NDArray[np.int64],
    frequencies: npt.NDArray[np.float64],
    magnitudes: npt.NDArray[np.float64],
) -> npt.NDArray[np.float32]:
    """Return cosines and sines times `magnitudes`, [positions, 2, head_dim / 2] f32."""
    angles = positions[:, None] * frequencies
    turns = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return np.asarray(magnitudes * turns, np.float32)
