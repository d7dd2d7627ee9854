"""Times of the kernels of routed experts with many tiles, for gpt-oss-20b, on a GPU that needs no compiler.

    python -m bench.tune_experts FOLDER                      # here: compiles, from the repository's root
    python3 FOLDER/expert_times.py --json times.json         # there: checks and times what FOLDER holds

As bench/tune_matmul.py does it, whose `--tile` this takes too. Without any, CANDIDATES are tried.
"""

from __future__ import annotations

import argparse
import gzip
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.gpu.models import MODELS
from bench.kernel_folder import fill
from bench.tune_matmul import tile_label, tile_of
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import compile_kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles
from shortfin_apps.llm.builder.lowering.triton.expert_kernels import ExpertKernels
from shortfin_apps.llm.builder.lowering.triton.tiles import MatmulTile
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.layout import BlockRows
from shortfin_apps.llm.model.feed_forward import MoE
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.model.weight_blocks import MXFP4

SPEC = MODELS["gpt-oss-20b"].spec
MATMULS = ("gated", "multiply")
OTHERS = ("route", "sort", "sum")
TOKENS = (1, 8, 64, 256, 512, 2048)
CANDIDATES = (
    *("16x16x512:2:4", "16x32x512:4:4", "16x64x512:4:4", "16x32x256:2:6", "16x64x256:4:4", "16x64x256:4:6"),
    *("16x128x512:4:3", "16x128x256:4:4", "16x64x1024:4:3", "32x64x512:4:4", "32x128x256:4:4"),
    *("64x64x256:4:4", "64x64x128:4:6", "64x128x128:4:4", "64x128x256:8:3", "64x128x128:8:4"),
    *("128x64x128:4:4", "128x128x128:8:3", "128x128x128:8:4", "128x128x128:4:4", "128x256x128:8:3"),
)


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel to compile, by its method of ExpertKernels, and the numbers of tokens to time it with."""

    device: str
    kind: str
    tile: MatmulTile
    tokens: list[int]

    @property
    def kernel(self) -> Kernel:
        kernels = ExpertKernels(SPEC, BuildOptions(device=self.device), experts())
        match self.kind:
            case "sort":
                return kernels.sort(self.tile.rows)
            case "route":
                return kernels.route()
            case "sum":
                return kernels.sum()
        made: Kernel = getattr(kernels, self.kind)(BlockRows(MXFP4), self.tile)
        return made


def main() -> None:
    args = _parse()
    fill(args.folder, "expert_times.py", list(_jobs(args)), _compile, args.jobs)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda:sm_90", help="the GPU to compile for")
    parser.add_argument("--only", default="", metavar="PATTERN", help="of " + ", ".join(MATMULS + OTHERS))
    parser.add_argument("--tokens", type=_numbers, default=TOKENS, metavar="N,N,...")
    parser.add_argument("--tile", type=tile_of, action="append", help="ROWSxCOLUMNSxBYTES:WAVES:STAGES")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at once")
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def experts() -> MoE:
    """Return the experts of SPEC."""
    assert SPEC.experts is not None
    return SPEC.experts


def _jobs(args: argparse.Namespace) -> Iterator[Job]:
    tiles: Sequence[MatmulTile] = args.tile or [tile_of(each) for each in CANDIDATES]
    for kind in (each for each in MATMULS if re.search(args.only, each)):
        for tile in tiles:
            suits = [each for each in args.tokens if _suits(tile.rows, each)]
            if suits:
                yield Job(args.device, kind, tile, suits)
    for kind in (each for each in OTHERS if re.search(args.only, each)):
        yield Job(args.device, kind, tile_of("16x16x64:1:1"), list(args.tokens))


def _suits(tile_rows: int, tokens: int) -> bool:
    """Whether an expert's rows neither fill only a small part of a tile nor need many tiles."""
    rows = tokens * experts().per_token / experts().count
    return tile_rows <= 4 * max(rows, 4) and rows <= 8 * tile_rows


def _compile(job: Job, folder: Path) -> dict[str, Any] | None:
    """Write the kernel's PTX and return its table entry; None if Triton cannot compile it."""
    kernel, target = job.kernel, resolve_target(job.device)
    try:
        code = compile_kernel(kernel, target.architecture, target.cpu)
    except Exception as error:  # Triton raises many types
        print(f"{job.kind} {tile_label(job.tile)}: {error!s}")
        return None
    file = f"{job.kind}.{tile_label(job.tile).replace(':', '_')}.ptx.gz"
    (folder / file).write_bytes(gzip.compress(code.image))
    routed = experts()
    return {
        "file": file,
        "kind": job.kind,
        "tokens": job.tokens,
        "tile": tile_label(job.tile) if job.kind in MATMULS else "-",
        "tile_rows": job.tile.rows,
        "hidden": SPEC.hidden_size,
        "features": routed.features,
        "count": routed.count,
        "per_token": routed.per_token,
        "eps": SPEC.rms_norm_eps,
        "name": kernel.name,
        "threads": code.threads,
        "shared_bytes": code.shared_bytes,
        "grid": [asdict(each) if isinstance(each, Tiles) else each for each in kernel.grid],
        "buffers": {name: [each.dtype, each.shape] for name, each in kernel.interface.buffers.items()},
        "constants": kernel.interface.constants,
    }


if __name__ == "__main__":
    main()
