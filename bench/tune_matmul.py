"""Times of the matmul kernels with many tiles, for the shapes of models, on a GPU that needs no compiler.

    python -m bench.tune_matmul FOLDER                       # here: compiles, from the repository's root
    python3 FOLDER/matmul_times.py --json times.json         # there: checks and times what FOLDER holds

The second needs Python with numpy and the GPU's driver only. A tile is written as `lowering/triton/tiles.py`
has it: rows, columns, bytes of K, waves, stages and, if more than one, parts, then any limit of registers:
`--tile 8x32x1024:4:4:4:96`. That of `lowering/triton/hopper_matmul.py` has columns and stages: `--tile
hopper:128:6`; that of `hopper_block_matmul.py`, for weights in blocks, tokens and stages: `--tile
blocks:64:6`. Without any, CANDIDATES are tried.
"""

from __future__ import annotations

import argparse
import gzip
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from bench.gpu.models import MODELS as GPU_MODELS
from bench.kernel_folder import fill
from bench.matmul_candidates import CANDIDATES
from bench.whole_slab import whole_slab
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import CodeObject, compile_kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.lowering.triton.hopper_block_matmul import (
    HopperBlockTile,
    block_tile,
    takes_blocks,
    with_block_tile,
)
from shortfin_apps.llm.builder.lowering.triton.hopper_matmul import (
    ROWS,
    HopperTile,
    hopper_tile,
    takes,
    with_tile,
)
from shortfin_apps.llm.builder.lowering.triton.matmul import MatmulKernels, block_constants
from shortfin_apps.llm.builder.lowering.triton.tiles import MatmulTile, tiles_of
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.builder.weights.chosen_layout import block_rows
from shortfin_apps.llm.builder.weights.layout import Fp8Rows, RowMajor, WeightLayout
from shortfin_apps.llm.contract.gpu_code.chips import Fp8Type
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.feed_forward import MLP
from shortfin_apps.llm.model.kv_layout import KVType
from shortfin_apps.llm.model.rope import Rope
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec
from shortfin_apps.llm.model.weight_blocks import Q4_1, Q8_0, BlockType

_ROPE = Rope(theta=1e6)


def _shaped(hidden_size: int, attention: Attention, mlp: MLP) -> ModelSpec:
    """Return a model with one layer of a published model's shapes."""
    return replace(GPU_MODELS["llama-3.1-8b"].spec, hidden_size=hidden_size, layers=((attention, mlp),))


# One layer each, so that the cache is as small as possible.
MODELS = {
    short: replace(GPU_MODELS[name].spec, layers=GPU_MODELS[name].spec.layers[:1])
    for short, name in (("8b", "llama-3.1-8b"), ("135m", "smollm2-135m"))
} | {
    "qwen2.5-7b": _shaped(
        3584,
        Attention(heads=28, kv_heads=4, head_dim=128, rope=_ROPE, bias=True),
        MLP(features=18944),
    ),
    "qwen3-8b": _shaped(
        4096,
        Attention(heads=32, kv_heads=8, head_dim=128, rope=_ROPE, qk_norm=True),
        MLP(features=12288),
    ),
    "gemma-3-4b": _shaped(
        2560,
        Attention(heads=8, kv_heads=4, head_dim=256, rope=_ROPE, qk_norm=True),
        MLP(features=10240, activation="gelu"),
    ),
    "gpt-oss-20b": _shaped(
        2880,
        Attention(heads=64, kv_heads=8, head_dim=64, rope=_ROPE, bias=True),
        MLP(features=2880),  # its experts have separate kernels
    ),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
WEIGHTS: dict[str, BlockType | Fp8Type | None] = {
    "bf16": None,
    "q8_0": Q8_0,
    "q4": Q4_1,
    "q4_k": BlockType(4, has_minima=True, group=256),
    "q5_k": BlockType(8, has_minima=True, group=256),
    "q6_k": BlockType(8, 16, group=256),
    "fp8": "f8E4M3FN",
}
MAX_ROWS = 128  # of logits computed by one invocation

Tile = MatmulTile | HopperTile | HopperBlockTile


@dataclass(frozen=True, slots=True)
class Case:
    """A model's matmul: its method of MatmulKernels, its weight's shape, and absent operands.

    `kv`: the type of the cache.
    """

    model: str
    name: str
    kind: str
    shape: tuple[int, int]
    absent: frozenset[str] = frozenset()
    weights: str = "bf16"
    kv: KVType = "bf16"

    def layout(self, device: str) -> WeightLayout:
        match WEIGHTS[self.weights]:
            case BlockType() as blocks:
                return block_rows(blocks, "bf16", resolve_target(device))
            case None:
                return RowMajor("bf16")
            case fp8:
                return Fp8Rows(fp8)

    def kernel(self, device: str, tile: Tile) -> Kernel:
        if isinstance(tile, HopperTile):
            return with_tile(self.kernel(device, _ANY_TILE), tile)
        if isinstance(tile, HopperBlockTile):
            return with_block_tile(self.kernel(device, _ANY_TILE), tile)
        spec, options = MODELS[self.model], BuildOptions(device=device, kv=self.kv)
        kernels = MatmulKernels(spec, options, lambda *_: tile)
        slab = [whole_slab(spec, options)] if self.kind == "project_qkv" else []
        by_kind: dict[str, list[Any]] = {
            "project_qkv": [spec.attention],
            "gated_linear": [spec.blocks_of(MLP)[0].activation],
        }
        first = by_kind.get(self.kind, [])
        made: Kernel = getattr(kernels, self.kind)(*first, self.shape, "tokens", *slab, self.layout(device))
        return made.without(self.absent)

    def built_tile(self, target: Target, tokens: int) -> Tile:
        """Return the tile that a build uses."""
        tile = tiles_of(target).matmul(tokens, self.shape, self.layout(target.device))
        if not target.cpu.startswith("sm_90"):
            return tile
        kernel = self.kernel(target.device, tile)
        return hopper_tile(kernel, tokens) or block_tile(kernel, tokens) or tile


_ANY_TILE = MatmulTile(128, 128, 128, Tuning(8, 4))  # of a kernel that has another form


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel to compile, and numbers of tokens to time it with; `is_built`: a build uses it for them."""

    device: str
    case: Case
    tile: Tile
    tokens: list[int]
    is_built: bool


def main() -> None:
    args = _parse()
    cases = [
        replace(case, weights=args.weights, kv=args.kv)
        for case in _cases(args.model)
        if re.search(args.only, case.name)
    ]
    jobs = [job for case in cases for job in _jobs(args.device, case, args.tile, args.tokens)]
    fill(args.folder, "matmul_times.py", jobs, _compile, args.jobs)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda:sm_90", help="the GPU to compile for")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: all")
    parser.add_argument("--only", default="", metavar="PATTERN", help="matmuls by name: qkv, o, gate_up, ...")
    parser.add_argument("--weights", choices=list(WEIGHTS), default="bf16")
    parser.add_argument("--kv", choices=get_args(KVType), default="bf16", help="the type of the cache")
    parser.add_argument("--tokens", type=_numbers, default=TOKENS, metavar="N,N,...")
    parser.add_argument(
        "--tile",
        type=any_tile_of,
        action="append",
        help="ROWSxCOLUMNSxBYTES:WAVES:STAGES[:PARTS[:REGISTERS]], hopper:COLUMNS:STAGES or "
        "blocks:TOKENS:STAGES",
    )
    parser.add_argument("--jobs", type=int, default=2, help="compilations at once")
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def any_tile_of(text: str) -> Tile:
    kind, *sizes = text.split(":")
    if kind == "hopper":
        return HopperTile(*map(int, sizes))
    if kind == "blocks":
        return HopperBlockTile(*map(int, sizes))
    return tile_of(text)


def tile_of(text: str) -> MatmulTile:
    sizes, waves, stages, *others = text.split(":")
    rows, columns, depth_bytes = map(int, sizes.split("x"))
    parts = int(others[0]) if others else 1
    most = int(others[1]) if len(others) > 1 else None
    tuning = Tuning(int(waves), int(stages), max_registers=most)
    return MatmulTile(rows, columns, depth_bytes, tuning, parts=parts)


def _cases(models: Sequence[str] | None) -> Iterator[Case]:
    for model in models or MODELS:
        spec = MODELS[model]
        hidden, heads = spec.hidden_size, spec.attention.q_features
        given = {"bias": spec.attention.bias, "head_norm": spec.attention.qk_norm}
        absent = frozenset(name for name, is_given in given.items() if not is_given)
        yield Case(model, "qkv", "project_qkv", (spec.attention.qkv_features, hidden), absent)
        yield Case(model, "o", "linear", (hidden, heads), frozenset({"in_squares"}))
        yield Case(model, "gate_up", "gated_linear", (2 * spec.blocks_of(MLP)[0].features, hidden))
        yield Case(
            model, "down", "linear", (hidden, spec.blocks_of(MLP)[0].features), frozenset({"in_squares"})
        )
        without = frozenset({"in_squares", "residual", "norm", "scaled", "squares"})
        yield Case(model, "head", "linear", (spec.vocab_size, hidden), without)


def _jobs(device: str, case: Case, tiles: Sequence[Tile] | None, tokens: Sequence[int]) -> Iterator[Job]:
    """Yield the tiles that a build uses, then others, each with the numbers of tokens that suit it."""
    tokens = [each for each in tokens if case.name != "head" or each <= MAX_ROWS]
    target, built_for = resolve_target(device), dict[Tile, list[int]]()
    for each in tokens:
        built_for.setdefault(case.built_tile(target, each), []).append(each)
    for tile, most in built_for.items():
        yield Job(device, case, tile, most, is_built=True)
    for tile in tiles or map(any_tile_of, CANDIDATES):
        kernel = case.kernel(device, _ANY_TILE)
        if isinstance(tile, HopperTile) and not takes(kernel, tile):
            continue
        if isinstance(tile, HopperBlockTile) and not takes_blocks(kernel):
            continue
        suits = [each for each in tokens if _suits(tile, each) and each not in built_for.get(tile, [])]
        if suits:
            yield Job(device, case, tile, suits, is_built=False)


def _suits(tile: Tile, tokens: int) -> bool:
    """Whether the tokens fill more than half of a tile, but do not need too many tiles of its size."""
    rows = _rows(tile)
    least = 0 if rows <= 16 else rows // 2
    return least < tokens <= (8 * rows if rows < 128 else tokens)


def _rows(tile: Tile) -> int:
    match tile:
        case HopperTile():
            return ROWS
        case HopperBlockTile(tokens):
            return tokens
    return tile.rows


def _compile(job: Job, folder: Path) -> dict[str, Any] | None:
    """Write the kernel's PTX and return its table entry; None if Triton cannot compile it."""
    case, target = job.case, resolve_target(job.device)
    kernel = case.kernel(job.device, job.tile)
    try:
        code = compile_kernel(kernel, target.architecture, target.cpu)
    except Exception as error:  # Triton raises many types
        print(f"{case.model} {case.name} {tile_label(job.tile)}: {error!s}")
        return None
    label = tile_label(job.tile).replace(":", "_")
    file = f"{case.model}.{case.name}.{label}{'.built' if job.is_built else ''}.ptx.gz"
    (folder / file).write_bytes(gzip.compress(code.image))
    return {
        "file": file,
        "tokens": job.tokens,
        "is_built": job.is_built,
        **_entry(job.device, case, job.tile, kernel, code),
    }


def _entry(device: str, case: Case, tile: Tile, kernel: Kernel, code: CodeObject) -> dict[str, Any]:
    """Return the description of a kernel for matmul_times.py."""
    spec = MODELS[case.model]
    return {
        "model": case.model,
        "case": case.name,
        "kind": case.kind,
        "shape": case.shape,
        "weights": case.weights,
        "blocks": block_constants(case.layout(device)),
        "eps": spec.rms_norm_eps,
        "activation": spec.blocks_of(MLP)[0].activation,
        "heads": [spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim],
        "stride": BuildOptions().block_seq_stride,
        "tile": tile_label(tile),
        "name": kernel.name,
        "threads": code.threads,
        "shared_bytes": code.shared_bytes,
        "grid": [asdict(each) if isinstance(each, Tiles) else each for each in kernel.grid],
        "buffers": {name: [each.dtype, each.shape] for name, each in kernel.interface.buffers.items()},
        "constants": kernel.interface.constants,
    }


def tile_label(tile: Tile) -> str:
    """Format a tile as in `--tile`."""
    match tile:
        case HopperTile(columns, stages):
            return f"hopper:{columns}:{stages}"
        case HopperBlockTile(tokens, stages):
            return f"blocks:{tokens}:{stages}"
    sizes = f"{tile.rows}x{tile.columns}x{tile.depth_bytes}"
    most = tile.tuning.max_registers
    parts = f":{tile.parts}" if tile.parts > 1 or most else ""
    registers = f":{most}" if most else ""
    return f"{sizes}:{tile.tuning.num_waves}:{tile.tuning.num_stages}{parts}{registers}"


if __name__ == "__main__":
    main()
