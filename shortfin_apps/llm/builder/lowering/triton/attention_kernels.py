"""The kernels of attention over pages, with the tiles of a kind of GPU."""

from __future__ import annotations

from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles
from shortfin_apps.llm.builder.kernels.interface import Buffer, Interface, buffer
from shortfin_apps.llm.builder.kernels.triton.attention import attend, attend_singles
from shortfin_apps.llm.builder.lowering.triton.tiles import (
    MOST_SPLITS,
    AttentionTile,
    TileTable,
    fitted,
    power_of_two,
)
from shortfin_apps.llm.builder.model.config import KV_ITEM_BYTES, context_length, page_elements
from shortfin_apps.llm.builder.model.spec import BuildOptions, ModelSpec


class AttentionKernels:
    """Those of a model. A single token's context is shared by workgroups, each of which takes `split` slots,
    or more where `most_splits` of them would not suffice."""

    def __init__(self, spec: ModelSpec, options: BuildOptions, tiles: TileTable) -> None:
        self._spec = spec
        self._options = options
        self._tiles = tiles
        self._sharing = spec.num_attention_heads // spec.num_key_value_heads
        self.split = tiles.split
        # There is room for all parts of the longest row, so that the size of a decode's workspace is known.
        self.most_splits = min(MOST_SPLITS, -(-context_length(spec, options) // self.split))

    def attend(self, leaves_singles: bool) -> Kernel:
        """Attention of tiles of tokens."""
        tile = self._fitted(self._tiles.attention)
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
            grid=[self._spec.num_key_value_heads, Tiles("tokens", tokens, more="rows")],
            tuning=tile.tuning,
        )

    def attend_singles(self) -> Kernel:
        """Attention of rows of one token, split over the row's slots."""
        spec = self._spec
        tile = self._fitted(self._tiles.decode_attention)
        heads = (spec.num_attention_heads, self.most_splits)
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
            constexprs={
                **self._constexprs(tile),
                "SPLIT": self.split,
                "MOST_SPLITS": self.most_splits,
                # As many as give each lane its own: emulated GPUs report lanes that write the same number.
                "BLOCK_SPLITS": max(16, power_of_two(self.most_splits)),
            },
            grid=[Tiles("rows"), spec.num_key_value_heads, Tiles("splits")],
            tuning=tile.tuning,
        )

    @property
    def _reads(self) -> dict[str, Buffer]:
        kv = self._options.kv
        return {
            "q": buffer(kv, "tokens", self._features),
            "cache": buffer(kv, "pages", page_elements(self._spec, self._options)),
            **{name: buffer("i64", "rows") for name in ("offsets", "starts", "seq_lens")},
            "blocks": buffer("i64", "rows", "width"),
        }

    @property
    def _out(self) -> Buffer:
        return buffer(self._options.activations, "tokens", self._features)

    @property
    def _features(self) -> int:
        return self._spec.num_attention_heads * self._spec.head_dim

    def _fitted(self, tile: AttentionTile) -> AttentionTile:
        head_bytes = self._spec.head_dim * KV_ITEM_BYTES[self._options.kv]
        return fitted(tile, self._sharing, head_bytes)

    def _constexprs(self, tile: AttentionTile) -> dict[str, int]:
        spec, stride = self._spec, self._options.block_seq_stride
        return {
            "HEADS": spec.num_attention_heads,
            "KV_HEADS": spec.num_key_value_heads,
            "HEAD_DIM": spec.head_dim,
            "BLOCK_DIM": max(16, power_of_two(spec.head_dim)),
            "STRIDE": stride,
            "PAGE_ROWS": spec.num_hidden_layers * 2 * stride,
            "QUERIES": tile.queries,
            "COLUMNS": tile.columns,
        }
