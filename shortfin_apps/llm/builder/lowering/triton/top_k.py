"""Top-k in Triton."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import Buffer, Interface, buffer
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
        best = self._launcher.launch(e, of_chunks, operands)
        made = self._launcher.launch(e, of_row, {**operands, **best})
        return made["values"], made["indices"]


def top_k_kernels(size: int, k: int, architecture: str) -> tuple[Kernel, Kernel]:
    """Return the kernels that find the best of each chunk and group, and the best `k` of `size` elements."""
    chunk = chunk_of(size, k)
    chunks = -(-size // chunk)
    sizes = {"SIZE": size, "CHUNK": chunk, "CHUNKS": chunks, "GROUPS": -(-chunks // chunk)}
    # A sort keeps lane masks in scalar registers; CDNA has enough of these for 256 lanes.
    waves = 4 if architecture == "amdgpu" else 8
    return _chunks_kernel(sizes), _row_kernel(sizes, k, waves)


def chunk_of(size: int, k: int) -> int:
    """Return the size of a chunk, so that there are about as many groups as chunks in k groups."""
    return power_of_two(max(2, round((size / power_of_two(k)) ** (1 / 3))))


def _chunks_kernel(sizes: dict[str, int]) -> Kernel:
    chunk, chunks = sizes["CHUNK"], sizes["CHUNKS"]
    tile = max(chunk, min(_TILE // chunk, power_of_two(chunks)))
    return Kernel(
        name="best_of_chunks",
        function=best_of_chunks,
        interface=Interface(constants=(), reads=_logits(sizes), writes=_best(sizes)),
        constexprs={**sizes, "TILE": tile},
        grid=[Tiles("rows"), -(-chunks // tile)],
        tuning=Tuning(num_waves=4),
    )


def _row_kernel(sizes: dict[str, int], k: int, waves: int) -> Kernel:
    kept = power_of_two(k)
    return Kernel(
        name="best_of_row",
        function=best_of_row,
        interface=Interface(
            constants=(),
            reads={**_logits(sizes), **_best(sizes)},
            writes={"values": buffer("f32", "rows", k), "indices": buffer("i64", "rows", k)},
        ),
        constexprs={**sizes, "BLOCK": max(kept, power_of_two(sizes["GROUPS"])), "KEPT": kept, "K": k},
        grid=[Tiles("rows")],
        tuning=Tuning(num_waves=waves),
    )


def _logits(sizes: dict[str, int]) -> dict[str, Buffer]:
    return {"logits": buffer("f32", "rows", sizes["SIZE"])}


def _best(sizes: dict[str, int]) -> dict[str, Buffer]:
    return {
        "best": buffer("i64", "rows", sizes["CHUNKS"]),
        "best_groups": buffer("i64", "rows", sizes["GROUPS"]),
    }
