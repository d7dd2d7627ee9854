"""Times of decodes as one launch, with several tiles, on a GPU that needs no compiler.

    python -m bench.tune_one_launch FOLDER --model 1b           # here: compiles, from the repository's root
    python3 FOLDER/one_launch_times.py                          # there: times what FOLDER holds

The second needs Python with numpy and the GPU's driver only. A variant is written as workgroups, waves,
stages, bytes of K and, if other than a build's, attention's stages and slots of a share:
`--variant 132:4:4:512:3:128`. The first kernel of a case is the one that a build has.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from bench.gpu.models import MODELS as GPU_MODELS
from bench.kernel_folder import fill
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import CodeObject, compile_kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tuning
from shortfin_apps.llm.builder.lowering.triton import one_launch_kernels
from shortfin_apps.llm.builder.lowering.triton.one_launch_kernels import (
    COLUMNS,
    NUM_COLUMNS,
    Decode,
    OneLaunchKernels,
)
from shortfin_apps.llm.builder.lowering.triton.tiles import one_launch_tiles, tiles_of
from shortfin_apps.llm.builder.program.module import ModelModule
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.feed_forward import MLP
from shortfin_apps.llm.model.rope import Rope
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, WeightType

_8B = GPU_MODELS["llama-3.1-8b"].spec


def _smaller(name: str, layers: int, hidden: int, heads: int, head_dim: int, features: int) -> ModelSpec:
    attention = Attention(heads=heads, kv_heads=8, head_dim=head_dim, rope=Rope(theta=5e5))
    blocks = layers * ((attention, MLP(features=features)),)
    return replace(_8B, name=name, hidden_size=hidden, layers=blocks, tie_word_embeddings=True)


MODELS = {
    "135m": (GPU_MODELS["smollm2-135m"].spec, 256),
    "1b": (_smaller("llama-3.2-1b", 16, 2048, 32, 64, 8192), 1024),
    "3b": (_smaller("llama-3.2-3b", 28, 3072, 24, 128, 8192), 1024),
    "8b": (_8B, 1024),
    "8b-norms": (  # of q and k, as in Qwen3
        replace(_8B, layers=tuple((replace(each, qk_norm=True), mlp) for each, mlp in _8B.layers)),
        1024,
    ),
}


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel to compile; without a `variant`, the one that a build has."""

    device: str
    model: str
    weights: WeightType
    rows: int
    context: int | None
    variant: str


def main() -> None:
    args = _parse()
    fill(args.folder, "one_launch_times.py", list(_jobs(args)), _compile, args.jobs)


def _parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda:sm_90", help="the GPU to compile for")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: all")
    parser.add_argument("--weights", default="bf16", choices=("bf16", "q4", "q8_0", "fp8"))
    parser.add_argument("--context", type=int, help="tokens of each row; default: the model's own")
    parser.add_argument("--rows", type=int, action="append", help="default: 1 and 8")
    parser.add_argument("--variant", action="append", default=[], help="WORKGROUPS:WAVES:STAGES:BYTES")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at once")
    return parser.parse_args(args)


def _jobs(args: argparse.Namespace) -> Iterator[Job]:
    for model, rows in itertools.product(args.model or MODELS, args.rows or (1, 8)):
        for variant in ("", *args.variant):
            yield Job(args.device, model, args.weights, rows, args.context, variant)


class _Found(Exception):
    pass


def _kernel(job: Job) -> tuple[Kernel, int, Decode, WeightTypes]:
    """Return the kernel, the compute units it needs, its operations, and the weights' types."""
    spec, _ = MODELS[job.model]
    device, chip = job.device.split(":")
    target = Target(job.device, (), "nvptx", chip, frozenset())
    options = BuildOptions.for_device(device)
    options = replace(
        options,
        device=job.device,
        weights=job.weights,
        prefill_batch_sizes=(1,),
        decode_batch_sizes=(job.rows,),
        decode_loop_sizes=(),
        extend_sizes=(),
        one_launch=True,
    )
    found: list[tuple[Kernel, int, Decode]] = []
    original = OneLaunchKernels.decode_layers

    def noted(self: OneLaunchKernels, decode: Decode, rows: int, slab: Any) -> tuple[Kernel, int]:
        found.append((*original(self, decode, rows, slab), decode))
        return found[-1][:2]

    def tiles(target: Target, per_unit: int) -> Any:
        built = one_launch_tiles(target, per_unit)
        if not job.variant:
            return built
        programs, waves, stages, depth = map(int, job.variant.split(":")[:4])
        built = one_launch_tiles(target, max(1, programs // 132))
        return replace(built, programs=programs, depth_bytes=depth, tuning=Tuning(waves, stages))

    def attention(target: Target) -> Any:
        built = tiles_of(target)
        tile, own = built.decode_attention, list(map(int, job.variant.split(":")[4:] if job.variant else ()))
        if own:
            tile = replace(tile, tuning=replace(tile.tuning, num_stages=own[0]))
        return replace(built, decode_attention=tile, split=own[1] if len(own) > 1 else built.split)

    def no_code(kernels: Sequence[Kernel], architecture: str, chip: str) -> list[CodeObject]:
        raise _Found

    with (
        mock.patch.object(OneLaunchKernels, "decode_layers", noted),
        mock.patch.object(one_launch_kernels, "one_launch_tiles", tiles),
        mock.patch.object(one_launch_kernels, "tiles_of", attention),
        contextlib.suppress(_Found),
    ):
        ModelModule(spec, options, target, no_code).text()
    return *found[0], WeightTypes(spec, options, target)


def _compile(job: Job, folder: Path) -> dict[str, Any]:
    """Write the kernel's PTX and return its table entry."""
    (spec, own_context), (kernel, _, decode, weights) = MODELS[job.model], _kernel(job)
    context = job.context or own_context
    code = compile_kernel(kernel, "nvptx", job.device.split(":")[1])
    case, variant = f"{job.model}.{job.weights}.{job.rows}.{context}", job.variant or "built"
    file = f"{case}.{variant.replace(':', '_')}.ptx.gz"
    (folder / file).write_bytes(gzip.compress(code.image))
    [workgroups] = kernel.grid
    first = decode.layers[0]
    parameters = {
        field: list(weights.layout(name).stored("w", weights.shape(name)).values())
        for field, name in first.weights.items()
    }
    head = list(weights.layout(decode.head).stored("w", weights.shape(decode.head)).values())
    return {
        "file": file,
        "case": case,
        "variant": variant,
        "name": kernel.name,
        "threads": code.threads,
        "shared_bytes": code.shared_bytes,
        "workgroups": workgroups,
        "context": context,
        "rows": job.rows,
        "layers": len(spec.layers),
        "vocab": spec.vocab_size,
        "hidden": spec.hidden_size,
        "stride": BuildOptions().block_seq_stride,
        "parameters": parameters,
        "head": head,
        "page_rows": kernel.constexprs["PAGE_ROWS"],
        "columns": COLUMNS,
        "num_columns": NUM_COLUMNS,
        "buffers": {name: [each.dtype, each.shape] for name, each in kernel.interface.buffers.items()},
    }


if __name__ == "__main__":
    main()
