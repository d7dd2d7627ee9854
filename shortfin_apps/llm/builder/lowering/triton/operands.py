"""Operands of matmuls: weights, dequantised for large batches, and activations, quantised for fp8."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.kernels.triton import FP8_GROUP
from shortfin_apps.llm.builder.kernels.triton.blocks import widen
from shortfin_apps.llm.builder.kernels.triton.fp8 import quantise
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext
from shortfin_apps.llm.builder.lowering.triton.hopper_block_matmul import block_tile
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher
from shortfin_apps.llm.builder.lowering.triton.matmul import (
    MATRIX,
    block_constants,
    load_matrix,
    matrix,
    quantised,
)
from shortfin_apps.llm.builder.weights.layout import BlockRows, Fp8Rows, RowMajor, WeightLayout

# From this number of tokens on, dequantising a weight once is faster than doing so for each tile of tokens,
# except in the form for Hopper (hopper_block_matmul.py).
WIDENED_TOKENS = 256
_QUANTISED_ROWS = 16
_WIDENED_ROWS, _WIDENED_DEPTH = 32, 256


@dataclass(frozen=True, slots=True)
class Activations:
    """The input of a matmul: `x` [tokens, features].

    With a deferred norm, `x` is multiplied by the norm's weight, but not yet divided by rms; `squares`
    [tokens, features / GROUP] f32 has sums of squares from before this multiplication. Without, `squares` is
    None.
    """

    x: Tensor
    squares: Tensor | None = None


class MatmulOperands:
    """Prepares the operands of matmuls; emits the launches that this needs."""

    def __init__(self, context: LoweringContext, launcher: Launcher) -> None:
        self._act = context.options.activations
        self._weights = context.weights
        self._launcher = launcher

    def of(
        self,
        e: Emitter,
        given: Activations,
        weight: str,
        make: Callable[[WeightLayout], Kernel],
        absent: AbstractSet[str] = frozenset(),
    ) -> tuple[Kernel, dict[str, Dim | Tensor | None]]:
        """Return the kernel of a matmul with the weight, and its operands except those of its epilogue.

        `make` returns the kernel for the layout that it reads the weight in; `absent`: its buffers that the
        epilogue will not have.
        """
        layout, tokens = self._weights.layout(weight), given.x.shape[0]
        stored, kernel = load_matrix(e, self._weights, weight), make(layout)
        absent |= {"in_squares"} if given.squares is None else set()
        if isinstance(layout, BlockRows) and self._is_widened(kernel.without(absent), tokens):
            stored = self._widened(e, stored, self._weights.shape(weight), layout, given.x)
            kernel = make(RowMajor(self._act))
        x = self.activations(e, given.x, weight)
        return kernel, {"tokens": tokens, **x, "in_squares": given.squares, **stored}

    def _is_widened(self, kernel: Kernel, tokens: Dim) -> bool:
        """Whether a weight in blocks is dequantised before its matmul `kernel`."""
        if isinstance(tokens, int) and tokens < WIDENED_TOKENS:
            return False
        return not self._launcher.is_hopper or block_tile(kernel, tokens) is None

    def activations(self, e: Emitter, x: Tensor, weight: str) -> dict[str, Tensor]:
        """Return the operands for the input `x` of a matmul with the weight."""
        layout = self._weights.layout(weight)
        return self._quantised(e, x, layout) if isinstance(layout, Fp8Rows) else {"x": x}

    def _quantised(self, e: Emitter, x: Tensor, layout: Fp8Rows) -> dict[str, Tensor]:
        tokens, features = x.shape
        assert isinstance(features, int)
        made = quantised(layout.dtype, features)
        kernel = Kernel(
            name=f"quantise_{features}",
            function=quantise,
            interface=Interface(
                constants=("tokens",),
                reads={"x": buffer(self._act, "tokens", features)},
                writes={"quants": made["x"], "scales": made["x_scales"]},
            ),
            constexprs={"IN": features, "ROWS": _QUANTISED_ROWS},
            grid=[Tiles("tokens", _QUANTISED_ROWS), -(-features // FP8_GROUP)],
            tuning=Tuning(num_waves=4),
        )
        found = self._launcher.launch(e, kernel, {"tokens": tokens, "x": x})
        return {"x": found["quants"], "x_scales": found["scales"]}

    def _widened(
        self, e: Emitter, stored: dict[str, Tensor], shape: tuple[int, ...], layout: BlockRows, x: Tensor
    ) -> dict[str, Tensor]:
        """Return the operands of a weight in floats, for the input `x` of its matmul.

        x is an operand that is not constant. Without one, IREE would widen a small weight when the program is
        loaded, and free the stored one, which a decode as one launch reads by its address.
        """
        out_features, in_features = shape
        reads = matrix(layout, shape)
        kernel = Kernel(
            name=f"widen_{layout.blocks}_{out_features}x{in_features}",
            function=widen,
            interface=Interface(
                constants=(),
                reads={**reads, "x": buffer(self._act, "tokens", in_features)},
                writes={"y": buffer(self._act, out_features, in_features)},
            ),
            constexprs={
                "IN": in_features,
                "OUT": out_features,
                "BLOCKS": block_constants(layout),
                "COLUMNS": _WIDENED_ROWS,
                "DEPTH": _WIDENED_DEPTH,
                **dict.fromkeys(set(MATRIX) - reads.keys()),
            },
            grid=[-(-out_features // _WIDENED_ROWS), -(-in_features // _WIDENED_DEPTH)],
            tuning=Tuning(num_waves=4),
        )
        return {"w": self._launcher.launch(e, kernel, {**stored, "x": x})["y"]}
