"""Top-k by Triton kernels."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.kernels.triton.top_k import best_of_row, best_of_segments
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher
from shortfin_apps.llm.builder.lowering.triton.tiles import power_of_two

_SEGMENT = 2048  # elements that a workgroup sorts


class TritonTopK:
    """Kernels of TopK."""

    def __init__(self, context: LoweringContext) -> None:
        self._k = context.options.top_k
        self._launcher = Launcher(context.target, context.rendered)

    def top_k(self, e: Emitter, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, size = logits.shape
        assert isinstance(size, int)
        kept = power_of_two(self._k)
        segment = min(_SEGMENT, power_of_two(size))
        segments = -(-size // segment)
        first = self._launcher.launch(
            e, _segments_kernel(size, segment, kept), {"rows": rows, "logits": logits}
        )
        second = self._launcher.launch(
            e,
            _row_kernel(size, segments, kept, self._k),
            {"rows": rows, "logits": logits, "best": first["best"]},
        )
        return second["values"], second["indices"]


def _segments_kernel(size: int, segment: int, kept: int) -> Kernel:
    segments = -(-size // segment)
    return Kernel(
        name="best_of_segments",
        function=best_of_segments,
        interface=Interface(
            constants=(),
            reads={"logits": buffer("f32", "rows", size)},
            writes={"best": buffer("i64", "rows", segments, kept)},
        ),
        constexprs={"SIZE": size, "SEGMENT": segment, "KEPT": kept},
        grid=[Tiles("rows"), segments],
        tuning=Tuning(num_waves=4),
    )


def _row_kernel(size: int, segments: int, kept: int, k: int) -> Kernel:
    return Kernel(
        name="best_of_row",
        function=best_of_row,
        interface=Interface(
            constants=(),
            reads={"logits": buffer("f32", "rows", size), "best": buffer("i64", "rows", segments, kept)},
            writes={"values": buffer("f32", "rows", k), "indices": buffer("i64", "rows", k)},
        ),
        constexprs={
            "SIZE": size,
            "CANDIDATES": segments * kept,
            "BLOCK": power_of_two(segments * kept),
            "KEPT": kept,
            "K": k,
        },
        grid=[Tiles("rows")],
        tuning=Tuning(num_waves=8),
    )
