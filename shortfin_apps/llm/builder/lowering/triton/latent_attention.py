"""Latent attention in Triton: q times the key matrices, keys to the cache, attention, the value matrices."""

from __future__ import annotations

import math
from dataclasses import replace

from shortfin_apps.llm.builder.graph.batch import Slab
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.kernels.triton.latent import multiply_heads, store_latent
from shortfin_apps.llm.builder.lowering.lowering import Kernels, LoweringContext, Values
from shortfin_apps.llm.builder.lowering.triton.attention import launch_attention
from shortfin_apps.llm.builder.lowering.triton.attention_kernels import AttentionKernels, pages_of
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher
from shortfin_apps.llm.builder.lowering.triton.tiles import (
    AttentionTile,
    TileTable,
    latent_groups,
    latent_tiles,
    power_of_two,
    tiles_of,
)
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.latent_attention import AbsorbKeys, AttendLatent, ExpandValues, LatentAttention
from shortfin_apps.llm.model.operations import Operation
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec

_COLUMNS, _DEPTH_BYTES = 64, 128  # of a tile of the matmuls by head
_STORED_HEADS = 4  # heads of q that a workgroup writes


class TritonLatentAttention(Kernels):
    """Kernels of AbsorbKeys, AttendLatent and ExpandValues for GPUs."""

    def __init__(self, context: LoweringContext) -> None:
        super().__init__(context)
        self._tiles = latent_tiles(context.target, tiles_of(context.target))
        self._launcher = Launcher(context.target, context.rendered)

    def compute(self, e: Emitter, operation: Operation, values: Values) -> Tensor:
        match operation:
            case AbsorbKeys():
                return self._multiply(e, operation, values[operation.x])
            case ExpandValues():
                return self._multiply(e, operation, values[operation.x])
            case AttendLatent():
                return self._attend(e, operation, values)
        raise AssertionError(operation)

    def _multiply(self, e: Emitter, operation: AbsorbKeys | ExpandValues, x: Tensor) -> Tensor:
        _, features = x.shape
        assert isinstance(features, int)
        tokens = x.shape[0]
        is_small = self._options.batch_invariant or (isinstance(tokens, int) and tokens <= 16)
        kernel = matmul_by_head(operation, features, self._options, 16 if is_small else 64)
        operands = {"tokens": tokens, "x": x, "w": self._weights.load_one(e, operation.weight)}
        return self._launcher.launch(e, kernel, operands)["y"]

    def _attend(self, e: Emitter, operation: AttendLatent, values: Values) -> Tensor:
        batch, block, queries = values.batch, operation.block, values[operation.x]
        _, features = queries.shape
        assert isinstance(features, int)
        operands = {
            "tokens": batch.tokens,
            "layer": batch.place_of(operation.layer),
            "queries": queries,
            "absorbed": values[operation.absorbed],
            "joint": values[operation.joint],
            "norm": self._weights.load_one(e, operation.norm),
            "rotary": batch.rotary,
            "slots": batch.slots,
            "cache": batch.cache,
        }
        kernels = LatentKernels(self._spec, block, self._options, self._tiles)
        assert batch.slab.planes == 1, "the kernels read values from keys; the options name a CPU"
        made = self._launcher.launch(e, kernels.store(batch.slab, features), operands)
        batch.cache = made["cache"]
        if operation.only_stores:
            return made["q"]
        return launch_attention(
            e, self._launcher, kernels, made["q"], operation.layer, {"sinks": None}, batch
        )


class LatentKernels(AttentionKernels):
    """Creates the kernels of latent attention; its K/V heads are groups of query heads that share a tile."""

    def __init__(
        self, spec: ModelSpec, block: LatentAttention, options: BuildOptions, tiles: TileTable
    ) -> None:
        groups = latent_groups(block.heads)
        of_latents = Attention(heads=block.heads, kv_heads=groups, head_dim=block.rank, rope=None)
        super().__init__(spec, of_latents, options, tiles)
        self._latent = block
        self._row = block.kv_layout.row_elements(options.kv)
        self._tail = block.rotated

    def store(self, slab: Slab, query_row: int) -> Kernel:
        """Return the kernel that writes q and the keys; `query_row`: features of the value that has q."""
        block, options = self._latent, self._options
        return Kernel(
            name=f"store_latent_{query_row}",
            function=store_latent,
            interface=Interface(
                constants=("layer",),
                reads={
                    "queries": buffer("f32", "tokens", query_row),
                    "absorbed": buffer("f32", "tokens", block.heads * block.rank),
                    "joint": buffer("f32", "tokens", block.joint_features),
                    "norm": buffer("f32", block.rank),
                    "rotary": buffer("f32", "tokens", 2, block.rotated // 2),
                    "slots": buffer("i64", "tokens"),
                },
                writes={
                    "cache": pages_of(slab),
                    "q": buffer(options.query_dtype, "tokens", self._query_features),
                },
            ),
            constexprs={
                "HEADS": block.heads,
                "RANK": block.rank,
                "ROTATED": block.rotated,
                "PLAIN": block.plain,
                "QUERY_ROW": query_row,
                "JOINT_ROW": block.joint_features,
                # Attention itself divides scores by the square root of its head size, which is the rank.
                "SCALE": block.scale * math.sqrt(block.rank),
                "STRIDE": options.block_seq_stride,
                "ROW": self._row,
                "EPS": self._spec.rms_norm_eps,
                "BLOCK_HEADS": _STORED_HEADS,
                "BLOCK_RANK": power_of_two(block.rank),
                "BLOCK_HALF": power_of_two(block.rotated // 2),
            },
            grid=[Tiles("tokens"), -(-block.heads // _STORED_HEADS)],
            tuning=Tuning(num_waves=4),
        )

    def _fitted(self, tile: AttentionTile) -> AttentionTile:
        return replace(super()._fitted(tile), tuning=tile.tuning)


def matmul_by_head(
    operation: AbsorbKeys | ExpandValues, features: int, options: BuildOptions, rows: int
) -> Kernel:
    """Return the matmul of heads of `features` in all, in tiles of `rows` tokens."""
    block, act = operation.block, options.activations
    w_head = block.expanded_dim * block.rank
    if isinstance(operation, AbsorbKeys):
        name, sizes, x_head, x_type, y_type = (
            "absorb_keys",
            (block.plain, block.rank),
            block.head_dim,
            "f32",
            "f32",
        )
        first, w_in, w_out = 0, block.rank, 1
    else:
        name, sizes, x_head, x_type, y_type = (
            "expand_values",
            (block.rank, block.value_dim),
            block.rank,
            act,
            act,
        )
        first, w_in, w_out = block.plain * block.rank, 1, block.rank
    size_in, size_out = sizes
    item = 4 if act == "f32" else 2
    return Kernel(
        name=f"{name}_{rows}_{features}",
        function=multiply_heads,
        interface=Interface(
            constants=("tokens",),
            reads={
                "x": buffer(x_type, "tokens", features),
                "w": buffer(act, block.heads * block.expanded_dim, block.rank),
            },
            writes={"y": buffer(y_type, "tokens", block.heads * size_out)},
        ),
        constexprs={
            "HEADS": block.heads,
            "IN": size_in,
            "OUT": size_out,
            "X_ROW": features,
            "X_HEAD": x_head,
            "W_HEAD": w_head,
            "W_FIRST": first,
            "W_IN": w_in,
            "W_OUT": w_out,
            "ROWS": rows,
            "COLUMNS": _COLUMNS,
            "DEPTH": _DEPTH_BYTES // item,
        },
        grid=[Tiles("tokens", rows), block.heads, -(-size_out // _COLUMNS)],
        tuning=Tuning(num_waves=4),
    )
