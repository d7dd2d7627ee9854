"""Times of the attention kernels with many tiles, for two models, on a GPU that needs no compiler.

    python -m bench.tune_attention FOLDER                       # here: compiles, from the repository's root
    python3 FOLDER/attention_times.py                           # there: checks and times what FOLDER holds

The second needs Python with numpy and the GPU's driver only. A tile is written as in
`lowering/triton/tiles.py`: queries, slots, waves, stages, and a decode's split: `--tile 16x64:4:2:128`.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from bench.gpu.models import MODELS as GPU_MODELS
from bench.kernel_folder import fill
from bench.whole_slab import whole_slab
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import compile_kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.lowering.triton.attention_kernels import AttentionKernels
from shortfin_apps.llm.builder.lowering.triton.byte_attention import byte_form
from shortfin_apps.llm.builder.lowering.triton.tiles import FEW_ROWS, AttentionTile, TileTable, tiles_of
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.model.kv_layout import KVType
from shortfin_apps.llm.model.spec import BuildOptions

MODELS = {short: GPU_MODELS[name].spec for short, name in (("8b", "llama-3.1-8b"), ("135m", "smollm2-135m"))}
Kind = Literal["decode", "batch", "prefill"]  # a batch is a decode of more than FEW_ROWS rows
# (rows, new tokens of each, cached tokens of each)
BATCHES: dict[Kind, dict[str, tuple[tuple[int, int, int], ...]]] = {
    "decode": {
        "8b": ((1, 1, 1023), (8, 1, 1023), (32, 1, 1023), (1, 1, 8000)),
        "135m": ((1, 1, 255), (32, 1, 255), (1, 1, 8000)),
    },
    "batch": {
        "8b": ((64, 1, 1023), (64, 1, 4000), (256, 1, 1023), (256, 1, 1535), (512, 1, 191)),
        "135m": ((64, 1, 511), (128, 1, 255), (128, 1, 1023)),
    },
    "prefill": {
        "8b": ((1, 512, 0), (1, 2048, 0), (4, 512, 0), (1, 512, 3584)),
        "135m": ((1, 512, 0), (4, 128, 0), (1, 2048, 0)),
    },
}
TILES: dict[Kind, tuple[str, ...]] = {
    "decode": tuple(
        f"16x{columns}:{waves}:{stages}:{split}"
        for columns, waves, stages, split in itertools.product((64, 128), (1, 2, 4), (2, 3), (128, 256))
    ),
    "batch": tuple(
        f"16x{columns}:{waves}:{stages}:{split}"
        for columns, waves, stages, split in itertools.product((32, 64), (1, 2, 4), (3, 5), (256, 1024))
    ),
    "prefill": (
        *("64x64:4:2", "64x64:4:3", "64x64:4:4", "64x128:4:2", "64x128:4:3", "128x64:8:2", "128x64:8:3"),
        *("128x128:8:2", "128x128:8:3", "128x32:8:3", "256x64:8:3"),
    ),
}


@dataclass(frozen=True, slots=True)
class Tile:
    """A candidate: the tile, and the split of a decode."""

    tile: AttentionTile
    split: int = 128

    @property
    def label(self) -> str:
        """The tile in the format of `--tile`."""
        tile = self.tile
        sizes = f"{tile.queries}x{tile.columns}:{tile.tuning.num_waves}:{tile.tuning.num_stages}"
        return f"{sizes}:{self.split}"


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel to compile; `is_built`: a build uses it."""

    device: str
    model: str
    kind: Kind
    tile: Tile
    is_built: bool
    batch_invariant: bool
    kv: KVType

    @property
    def is_in_gluon(self) -> bool:
        """Whether this is the form of `byte_form`, in which a build has the kernel of its tile."""
        is_hopper = resolve_target(self.device).cpu.startswith("sm_90")
        return self.is_built and is_hopper and self.kind == "batch" and self.kv == "q8_0"

    @property
    def label(self) -> str:
        return self.tile.label + (":gluon" if self.is_in_gluon else "")

    def kernel(self) -> Kernel:
        tiles = replace(tiles_of(resolve_target(self.device)), split=self.tile.split)
        if self.kind == "prefill":
            tried = replace(tiles, attention=self.tile.tile)
        else:
            tried = replace(tiles, decode_attention=self.tile.tile)
        spec = MODELS[self.model]
        options = BuildOptions(device=self.device, kv=self.kv, batch_invariant=self.batch_invariant)
        kernels, slab = AttentionKernels(spec, spec.attention, options, tried), whole_slab(spec, options)
        if self.kind == "prefill":
            return kernels.attend(False, slab)
        kernel = kernels.attend_singles(slab).without({"offsets", "sinks"})
        return byte_form(kernel, "rows") if self.is_in_gluon else kernel


def main() -> None:
    args = _parse()
    jobs = list(
        _jobs(args.device, args.model or list(MODELS), args.only, args.tile, args.batch_invariant, args.kv)
    )
    fill(args.folder, "attention_times.py", jobs, _compile, args.jobs)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda:sm_90", help="the GPU to compile for")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: all")
    parser.add_argument("--only", choices=get_args(Kind), help="default: all")
    parser.add_argument("--tile", type=tile_of, action="append", help="QUERIESxSLOTS:WAVES:STAGES[:SPLIT]")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="as `build --batch-invariant` has them"
    )
    parser.add_argument("--kv", choices=("bf16", "q8_0"), default="bf16", help="type of the cache")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at once")
    return parser.parse_args()


def tile_of(text: str) -> Tile:
    sizes, *numbers = text.split(":")
    queries, columns = map(int, sizes.split("x"))
    waves, stages, *split = map(int, numbers)
    return Tile(AttentionTile(queries, columns, Tuning(waves, stages), sys.maxsize), *split)


def _jobs(
    device: str,
    models: Sequence[str],
    only: Kind | None,
    given: Sequence[Tile] | None,
    batch_invariant: bool = False,
    kv: KVType = "bf16",
) -> Iterator[Job]:
    """Yield the tile that a build uses, then others."""
    table = tiles_of(resolve_target(device))
    for model, kind in itertools.product(models, [only] if only else get_args(Kind)):
        built = _built(table, kind)
        job = Job(device, model, kind, built, True, batch_invariant, kv)
        yield job
        for tile in given or map(tile_of, TILES[kind]):
            if tile.label != job.label:
                yield Job(device, model, kind, tile, False, batch_invariant, kv)


def _built(table: TileTable, kind: Kind) -> Tile:
    if kind == "prefill":
        return Tile(table.attention)
    chosen = table.for_rows(FEW_ROWS + (kind == "batch"))
    return Tile(chosen.decode_attention, chosen.split)


def _compile(job: Job, folder: Path) -> dict[str, Any] | None:
    """Write the kernel's PTX and return its table entry; None if Triton cannot compile it."""
    target, kernel, spec = resolve_target(job.device), job.kernel(), MODELS[job.model]
    try:
        code = compile_kernel(kernel, target.architecture, target.cpu)
    except Exception as error:  # Triton raises many types
        print(f"{job.model} {job.kind} {job.label}: {error!s}")
        return None
    file = f"{job.model}.{job.kind}.{job.label.replace(':', '_')}.ptx.gz"
    (folder / file).write_bytes(gzip.compress(code.image))
    return {
        "file": file,
        "case": f"{job.model}.{job.kind}",
        "is_built": job.is_built,
        "tile": job.label,
        "batches": BATCHES[job.kind][job.model],
        "layers": len(spec.layers),
        "heads": [spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim],
        "stride": BuildOptions().block_seq_stride,
        "split": job.tile.split,
        "name": kernel.name,
        "threads": code.threads,
        "shared_bytes": code.shared_bytes,
        "grid": [asdict(each) if isinstance(each, Tiles) else each for each in kernel.grid],
        "buffers": {name: [each.dtype, each.shape] for name, each in kernel.interface.buffers.items()},
        "most_splits": kernel.constexprs["MOST_SPLITS"],
    }


if __name__ == "__main__":
    main()
