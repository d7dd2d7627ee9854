"""The attention block by Triton kernels: projection with rotation and cache write, then attention."""

from __future__ import annotations

from collections.abc import Mapping

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles
from shortfin_apps.llm.builder.kernels.interface import Buffer, Interface, buffer
from shortfin_apps.llm.builder.kernels.triton.attention import attend, attend_singles
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher
from shortfin_apps.llm.builder.lowering.triton.matmul import MatmulKernels, load_matrix
from shortfin_apps.llm.builder.lowering.triton.tiles import (
    MOST_SPLITS,
    SPLIT,
    AttentionTile,
    fitted,
    power_of_two,
    tiles_of,
)
from shortfin_apps.llm.builder.model.config import KV_ITEM_BYTES, context_length, page_elements


class TritonAttention:
    """q, k and v, the cache, and attention over it. Its pages are as those of the linalg kernels."""

    def __init__(self, context: LoweringContext, launcher: Launcher) -> None:
        self._spec = spec = context.spec
        self._act = context.options.activations
        self._kv = context.options.kv
        self._stride = context.options.block_seq_stride
        self._page_rows = spec.num_hidden_layers * 2 * self._stride
        self._page_elements = page_elements(spec, context.options)
        self._sharing = spec.num_attention_heads // spec.num_key_value_heads
        self._q_features = spec.num_attention_heads * spec.head_dim
        # There is room for all parts of the longest row, so that the size of a decode's workspace is known.
        self._most_splits = min(MOST_SPLITS, -(-context_length(spec, context.options) // SPLIT))
        self._head_bytes = spec.head_dim * KV_ITEM_BYTES[context.options.kv]
        self._tiles = tiles_of(context.target)
        self._matmuls = MatmulKernels(spec, context.options, self._tiles.matmul)
        self._weights = context.weights
        self._launcher = launcher

    def project(
        self,
        e: Emitter,
        x: Tensor,
        squares: Tensor | None,
        weight: str,
        bias: str | None,
        layer: int,
        batch: Batch,
    ) -> Tensor:
        """-> q [tokens, heads * head_dim], rotated, in the cache's type; k and v are in the cache then."""
        shape, layout = self._weights.shape(weight), self._weights.layout(weight)
        kernel = self._matmuls.project_qkv(shape, batch.tokens, layout)
        operands = {
            "tokens": batch.tokens,
            "layer": layer,
            "x": x,
            "in_squares": squares,
            **load_matrix(e, self._weights, weight),
            "bias": None if bias is None else self._weights.load_one(e, bias),
            "rotary": batch.rotary,
            "slots": batch.slots,
            "cache": batch.cache,
        }
        made = self._launcher.launch(e, kernel, operands)
        batch.cache = made["cache"]
        return made["q"]

    def attend(self, e: Emitter, q: Tensor, layer: int, batch: Batch) -> Tensor:
        """q as of `project` -> [tokens, heads * head_dim] in the type that matmuls read.

        In a decode all rows are single tokens; among packed rows some may be.
        """
        operands: dict[str, Dim | Tensor | None] = {
            "tokens": batch.tokens,
            "rows": batch.rows,
            "width": batch.width,
            "layer": layer,
            "q": q,
            "cache": batch.cache,
            "starts": batch.starts,
            "seq_lens": batch.seq_lens,
            "blocks": batch.blocks,
        }
        if batch.is_decode:
            return self._attend_singles(e, operands | {"offsets": None}, batch)
        operands["offsets"] = batch.offsets
        is_packed = batch.chunk is None
        operands["out"] = out = self._launcher.launch(e, self._kernel(is_packed), operands)["out"]
        return self._attend_singles(e, operands, batch) if is_packed else out

    def _attend_singles(
        self, e: Emitter, operands: Mapping[str, Dim | Tensor | None], batch: Batch
    ) -> Tensor:
        splits = e.at_most(e.ceil_divide(e.times(batch.width, self._stride), SPLIT), self._most_splits)
        given = {**operands, "splits": splits, "counters": batch.counters}
        made = self._launcher.launch(e, self._singles_kernel(), given)
        batch.counters = made["counters"]
        return made["out"]

    def _kernel(self, leaves_singles: bool) -> Kernel:
        """Attention of tiles of tokens."""
        tile = fitted(self._tiles.attention, self._sharing, self._head_bytes)
        tokens = tile.queries // self._sharing
        return Kernel(
            name="attend_several" if leaves_singles else "attend",
            function=attend,
            interface=Interface(
                constants=("tokens", "rows", "width", "layer"), reads=self._reads, writes={"out": self._out}
            ),
            constexprs={
                **self._constexprs(tile),
                "TOKENS": tokens,
                "LEAVES_SINGLES": leaves_singles,
            },
            grid=[Tiles("tokens", tokens, more="rows"), self._spec.num_key_value_heads],
            tuning=tile.tuning,
        )

    def _singles_kernel(self) -> Kernel:
        """Attention of rows of one token, split over the row's slots."""
        tile = fitted(self._tiles.decode_attention, self._sharing, self._head_bytes)
        spec = self._spec
        heads = (spec.num_attention_heads, self._most_splits)
        return Kernel(
            name="attend_singles",
            function=attend_singles,
            interface=Interface(
                constants=("tokens", "rows", "width", "layer"),
                reads=self._reads,
                writes={
                    "counters": buffer("i32", "rows", spec.num_key_value_heads),
                    "out": self._out,
                    "parts": buffer("f32", "rows", *heads, spec.head_dim),
                    "states": buffer("f32", "rows", *heads, 2),
                },
            ),
            constexprs={**self._constexprs(tile), "SPLIT": SPLIT, "MOST_SPLITS": self._most_splits},
            grid=[Tiles("rows"), spec.num_key_value_heads, Tiles("splits")],
            tuning=tile.tuning,
        )

    @property
    def _reads(self) -> dict[str, Buffer]:
        return {
            "q": buffer(self._kv, "tokens", self._q_features),
            "cache": buffer(self._kv, "pages", self._page_elements),
            **{name: buffer("i64", "rows") for name in ("offsets", "starts", "seq_lens")},
            "blocks": buffer("i64", "rows", "width"),
        }

    @property
    def _out(self) -> Buffer:
        return buffer(self._act, "tokens", self._q_features)

    def _constexprs(self, tile: AttentionTile) -> dict[str, int]:
        return {
            **self._heads,
            "BLOCK_DIM": max(16, power_of_two(self._spec.head_dim)),
            "PAGE_ROWS": self._page_rows,
            "QUERIES": tile.queries,
            "COLUMNS": tile.columns,
        }

    @property
    def _heads(self) -> dict[str, int]:
        spec = self._spec
        return {
            "HEADS": spec.num_attention_heads,
            "KV_HEADS": spec.num_key_value_heads,
            "HEAD_DIM": spec.head_dim,
            "STRIDE": self._stride,
        }
