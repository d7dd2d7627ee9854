"""Top-k in Triton."""

from __future__ import annotations

from math import isqrt

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.kernels.triton.top_k import best_of_chunks, best_of_row
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher
from shortfin_apps.llm.builder.lowering.triton.tiles import power_of_two

_TILE = 2048  # logits per workgroup of best_of_chunks


class TritonTopK:
    """TopK kernels for GPUs."""

    def __init__(self, context: LoweringContext) -> None:
        self._k = context.options.top_k
        self._architecture = context.target.architecture
        self._launcher = Launcher(context.target, context.rendered)

    def top_k(self, e: Emitter, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, size = logits.shape
        assert isinstance(size, int)
        of_chunks, of_row = top_k_kernels(size, self._k, self._architecture)
        operands = {"rows": rows, "logits": logits}
        best = self._launcher.launch(e, of_chunks, operands)["best"]
        made = self._launcher.launch(e, of_row, {**operands, "best": best})
        return made["values"], made["indices"]


def top_k_kernels(size: int, k: int, architecture: str) -> tuple[Kernel, Kernel]:
    """Return the kernels that find the best element of each chunk, and the best `k` of `size` elements."""
    chunk = chunk_of(size, k)
    # A sort keeps lane masks in scalar registers; CDNA has enough of these for 256 lanes.
    waves = 4 if architecture == "amdgpu" else 8
    return _chunks_kernel(size, chunk), _row_kernel(size, chunk, k, waves)


def chunk_of(size: int, k: int) -> int:
    """Return the size of a chunk, so that there are about as many chunks as elements in k chunks."""
    return power_of_two(max(2, isqrt(size // power_of_two(k))))


def _chunks_kernel(size: int, chunk: int) -> Kernel:
    chunks = -(-size // chunk)
    tile = min(_TILE // chunk, power_of_two(chunks))
    return Kernel(
        name="best_of_chunks",
        function=best_of_chunks,
        interface=Interface(
            constants=(),
            reads={"logits": buffer("f32", "rows", size)},
            writes={"best": buffer("i64", "rows", chunks)},
        ),
        constexprs={"SIZE": size, "CHUNK": chunk, "CHUNKS": chunks, "TILE": tile},
        grid=[Tiles("rows"), -(-chunks // tile)],
        tuning=Tuning(num_waves=4),
    )


def _row_kernel(size: int, chunk: int, k: int, waves: int) -> Kernel:
    chunks = -(-size // chunk)
    kept = power_of_two(k)
    return Kernel(
        name="best_of_row",
        function=best_of_row,
        interface=Interface(
            constants=(),
            reads={"logits": buffer("f32", "rows", size), "best": buffer("i64", "rows", chunks)},
            writes={"values": buffer("f32", "rows", k), "indices": buffer("i64", "rows", k)},
        ),
        constexprs={
            "SIZE": size,
            "CHUNK": chunk,
            "CHUNKS": chunks,
            "BLOCK": max(kept, power_of_two(chunks)),
            "KEPT": kept,
            "K": k,
        },
        grid=[Tiles("rows")],
        tuning=Tuning(num_waves=waves),
    )
