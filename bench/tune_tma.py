"""Times of candidates for the matmuls of prefills on Hopper, next to the kernels that a build uses.

python -m bench.tune_tma FOLDER                              # here: compiles, from the repository's root
python3 FOLDER/bf16/matmul_times.py; python3 FOLDER/fp8/...  # there, as with bench/tune_matmul.py
"""

# ruff: noqa
# mypy: ignore-errors

from __future__ import annotations

import argparse
import gzip
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import tma_kernels, tma_plain_kernels
from bench.kernel_folder import fill
from bench.tune_matmul import Case, _cases, _entry, _jobs, tile_label
from shortfin_apps.llm.builder.kernels.ahead_of_time import compile as compiling
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import CodeObject
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.lowering.triton.tiles import MatmulTile

TOKENS = (512, 2048)
PROGRAMS = 132
MAP_BYTES = 256  # two tensor maps
MOST_PROGRAMS = 1024  # 2,048 tokens in tiles of 128, and 4,096 columns in tiles of 64
_OPERANDS = (
    *("x", "x_scales", "in_squares", "w", "scales", "residual", "norm", "rotary", "slots"),
    *("cache", "y", "scaled", "squares", "scratch"),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A candidate: the size of its tile, and its form: "special" (tma_kernels.py) or "plain"."""

    form: str
    rows: int
    columns: int
    stages: int
    group_rows: int = 16
    paired: bool = False
    cases: tuple[str, ...] = ("qkv", "o", "gate_up", "down")

    @property
    def label(self) -> str:
        paired = ".paired" if self.paired else ""
        return f"{self.form}.{self.rows}x{self.columns}:{self.stages}:g{self.group_rows}{paired}"


BF16 = (
    Variant("special", 128, 256, 4),
    Variant("special", 128, 256, 4, group_rows=8),
    Variant("special", 128, 256, 3),
    Variant("special", 128, 128, 6),
    Variant("plain", 128, 256, 4, cases=("o", "down")),
    Variant("plain", 128, 128, 5, cases=("o", "down")),
)
FP8 = (
    Variant("special", 128, 256, 4),
    Variant("special", 128, 256, 4, group_rows=8),
    Variant("special", 128, 128, 6),
    Variant("special", 128, 128, 6, paired=True),
    Variant("plain", 128, 128, 5, cases=("o", "down")),
)


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel to compile: of a build (`tile`), or a candidate."""

    case: Case
    tile: MatmulTile
    tokens: list[int]
    variant: Variant | None = None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    for weights, variants in (("bf16", BF16), ("fp8", FP8)):
        jobs = list(_all_jobs(weights, variants, args.only))
        fill(args.folder / weights, "matmul_times.py", jobs, _compile, 2)


def _all_jobs(weights: str, variants: tuple[Variant, ...], only: str) -> Iterator[Job]:
    for case in _cases(["8b"]):
        if case.name == "head" or not re.search(only, case.name):
            continue
        case = replace(case, weights=weights)
        jobs = [job for job in _jobs("cuda:sm_90", case, None, TOKENS) if job.is_built]
        for job in jobs:
            yield Job(case, job.tile, job.tokens)
        for variant in variants:
            if case.name in variant.cases:
                yield Job(case, jobs[-1].tile, list(TOKENS), variant)


def _compile(job: Job, folder: Path) -> dict[str, Any] | None:
    case = job.case
    kernel = case.kernel("cuda:sm_90", job.tile)
    label = job.variant.label if job.variant else tile_label(job.tile)
    try:
        if job.variant is None:
            code = compiling.compile_kernel(kernel, "nvptx", "sm_90")
        else:
            kernel = _candidate(case, kernel, job.variant)
            code = compile_candidate(kernel)
    except Exception as error:  # Triton raises many types
        print(f"{case.name} {label}: {error!s}")
        return None
    file = f"{case.name}.{label.replace(':', '_')}{'' if job.variant else '.built'}.ptx.gz"
    (folder / file).write_bytes(gzip.compress(code.image))
    entry = _entry(case, job.tile, kernel, code)
    if case.kind == "project_qkv":
        entry["buffers"] = {"q" if name == "y" else name: each for name, each in entry["buffers"].items()}
    return entry | {"file": file, "tokens": job.tokens, "is_built": job.variant is None, "tile": label}


def _candidate(case: Case, built: Kernel, variant: Variant) -> Kernel:
    """Return the candidate with the built kernel's operands, and memory for its tensor maps."""
    rows, columns, item = variant.rows, variant.columns, 1 if case.weights == "fp8" else 2
    out_features, in_features = case.shape
    tiles = Tiles("tokens", rows), -(-out_features // columns)
    grid: Any = [PROGRAMS] if variant.form == "special" else tiles
    buffers = {**built.interface.buffers, "scratch": buffer("i8", MOST_PROGRAMS * MAP_BYTES)}
    function: Any = tma_kernels.matmul if variant.form == "special" else tma_plain_kernels.linear
    names = function.arg_names
    if variant.form == "special" and "q" in buffers:
        buffers["y"] = buffers.pop("q")
    ordered = {name: buffers[name] for name in _OPERANDS if name in buffers}
    constants = built.interface.constants
    old = built.constexprs
    ours: dict[str, Any] = {
        **{
            "KIND": case.kind,
            "ROWS": rows,
            "COLUMNS": columns,
            "DEPTH": 128 // item,
            "STAGES": variant.stages,
        },
        **{"GROUP_ROWS": variant.group_rows, "PAIRED": variant.paired, "WIDTH": 32 // item, "REGISTERS": 240},
        **{"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "STRIDE": 0, "ROW": 0, "SPECIAL": False},
        "OUT": old.get("OUT", out_features),
    }
    ours |= {name: old[name] for name in ("IN", "EPS", "GROUP", "STRIDE", "ROW") if name in old}
    used = {*ordered, *constants}
    constexprs = {name: ours.get(name) for name in names if name not in used}
    return Kernel(
        name=f"{built.name}_{variant.label}".translate({ord(c): "_" for c in ":."}),
        function=function,
        interface=Interface(constants, {}, ordered),
        constexprs=constexprs,
        grid=grid,
        tuning=Tuning(4 if variant.form == "special" else 8, variant.stages),
    )


def compile_candidate(kernel: Kernel) -> CodeObject:
    """Compile with Triton or Gluon; the kernel's buffer `scratch` becomes Triton's global scratch memory."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    target = GPUTarget("cuda", 90, 32)
    source: Any = GluonASTSource if kernel.function is tma_kernels.matmul else ASTSource
    options: Mapping[str, Any] = {
        "enable_fp_fusion": True,
        "num_warps": kernel.tuning.num_waves,
        "num_stages": kernel.tuning.num_stages,
        "ptx_version": 86,
    }
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), compiling._known_to_kernels(target):
        knobs.cache.dir = folder
        made = triton.compile(
            source(kernel.function, *compiling._signature(kernel)), target=target, options=options
        )
    assert made.metadata.global_scratch_size == MAP_BYTES, made.metadata.global_scratch_size
    text = with_scratch(made.asm["ptx"], kernel)
    return CodeObject(text.encode(), made.metadata.num_warps * 32, made.metadata.shared)


def with_scratch(ptx: str, kernel: Kernel) -> str:
    """Return the module with the uses of Triton's global scratch replaced by those of the operand `scratch`."""
    match = re.search(r"\.entry (?P<name>[\w$]+)\((?P<parameters>[^)]*)\)", ptx)
    assert match
    parameters = [each.strip() for each in match["parameters"].split(",")]
    names = [each.split()[-1] for each in parameters]
    num_operands = len(kernel.interface.buffers) + len(kernel.interface.constants)
    given = names[list(kernel.interface.buffers).index("scratch")]
    body = re.sub(re.escape(names[num_operands]) + r"\b", given, ptx[match.end() :])
    # PTX before 8.6 writes tiles to the cluster's memory; without clusters this is the workgroup's.
    body = body.replace("cp.async.bulk.tensor.2d.shared::cta.", "cp.async.bulk.tensor.2d.shared::cluster.")
    head = ptx[: match.start()].replace(".version 8.6", ".version 8.4")
    kept = ",\n\t".join(parameters[:num_operands])
    return f"{head}.entry {kernel.name}(\n\t{kept}\n){body}"


if __name__ == "__main__":
    main()
