"""Create the kernels of paged attention, with tiles for the kind of GPU."""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.builder.graph.batch import Slab
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import Buffer, Interface, buffer
from shortfin_apps.llm.builder.kernels.triton.attention import attend, attend_singles
from shortfin_apps.llm.builder.kernels.triton.qkv import store_qkv
from shortfin_apps.llm.builder.lowering.triton.tiles import (
    MOST_SPLITS,
    AttentionTile,
    TileTable,
    fitted,
    power_of_two,
)
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.config import context_length
from shortfin_apps.llm.model.kv_layout import kv_dtype
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec


class AttentionKernels:
    """Creates the kernels for an attention `block` of the model `spec`.

    For a sequence with a single new token, several workgroups split the context (flash-decoding): each takes
    `split` slots, or more if `most_splits` workgroups would not cover the context. With `--batch-invariant`,
    attention of several tokens uses the same parts of the context and the same number of slots per step.
    """

    def __init__(self, spec: ModelSpec, block: Attention, options: BuildOptions, tiles: TileTable) -> None:
        self._spec = spec
        self._block = block
        self._options = options
        self._tiles = tiles
        self._row = block.read_layout.row_elements(options.kv)
        # Elements of a key after the first `head_dim`; these are then the value.
        self._tail: int | None = None
        self._sharing = block.heads // block.kv_heads
        self.split = tiles.split
        self.stride = options.block_seq_stride
        # Derived from the maximum context, so that the size of a decode's workspace is known when building.
        self.most_splits = min(MOST_SPLITS, -(-context_length(spec, options) // self.split))

    @property
    def splits(self) -> int:
        """The maximum number of parts into which the context of a sequence is split."""
        window = self._block.window
        if window is None:
            return self.most_splits
        # The first part may start this many slots before the window.
        before = self.split if self._options.batch_invariant else self._decode_tile.columns
        return min(self.most_splits, -(-(window + before) // self.split))

    @property
    def _shares_grow(self) -> bool:
        """Whether `splits` shares of `split` slots may be fewer than a token attends to."""
        slots = context_length(self._spec, self._options)
        if self._block.window is not None:
            slots = min(slots, self._block.window + self.split)
        return self.splits * self.split < slots

    def attend(self, leaves_singles: bool, slab: Slab) -> Kernel:
        """Return the kernel for tiles of tokens.

        `leaves_singles`: the kernel skips sequences with one new token, which `attend_singles` handles.
        """
        tile = self._tile
        tokens = tile.queries // self._sharing
        return Kernel(
            name=("attend_several" if leaves_singles else "attend") + _suffix(self._block.window),
            function=attend,
            interface=Interface(
                constants=("tokens", "rows", "width", "layer"),
                reads=self._reads(slab),
                writes={"out": self._out},
            ),
            constexprs={
                **self._constexprs(tile, slab),
                "TOKENS": tokens,
                "LEAVES_SINGLES": leaves_singles,
                "MOST_SPLITS": self.splits if self._shares_grow else None,
            },
            grid=[self._block.kv_heads, Tiles("tokens", tokens, more="rows")],
            tuning=tile.tuning,
        )

    def attend_singles(self, slab: Slab) -> Kernel:
        """Return the kernel for sequences with one new token; several workgroups split the context."""
        block, tile = self._block, self._decode_tile
        most_splits = self.splits
        heads = (block.heads, most_splits)
        return Kernel(
            name=f"attend_singles{_suffix(self._block.window)}_{self.split}x{tile.columns}",
            function=attend_singles,
            interface=Interface(
                constants=("tokens", "rows", "width", "layer"),
                reads=self._reads(slab),
                writes={
                    "counters": buffer("i32", "rows", block.kv_heads),
                    "out": self._out,
                    "parts": buffer("f32", "rows", *heads, block.head_dim),
                    "states": buffer("f32", "rows", *heads, 2),
                },
            ),
            constexprs=self._constexprs(tile, slab),
            grid=[block.kv_heads, Tiles("rows"), Tiles("splits")],
            tuning=tile.tuning,
        )

    def store_qkv(self, slab: Slab, features: int) -> Kernel:
        """Return the kernel that norms and rotates q and k, writes k and v to the cache, and returns q.

        q is in `query_dtype`. `features`: features of a token in qkv; if they exceed those of q, k and v, qkv
        also has gates.
        """
        block, options = self._block, self._options
        turned = block.q_features + block.kv_features
        return Kernel(
            name=f"store_qkv{slab.suffix}",
            function=store_qkv,
            interface=Interface(
                constants=("layer",),
                reads={
                    "qkv": buffer("f32", "tokens", features),
                    "norm": buffer("f32", turned if block.whole_qk_norm else 2 * block.head_dim),
                    "rotary": buffer("f32", "tokens", 2, block.head_dim // 2),
                    "slots": buffer("i64", "tokens"),
                },
                writes={
                    "cache": pages_of(slab),
                    "q": buffer(options.query_dtype, "tokens", self._features),
                },
            ),
            constexprs={
                "HEADS": block.heads,
                "KV_HEADS": block.kv_heads,
                "HEAD_DIM": block.head_dim,
                "BLOCK_HALF": power_of_two(block.head_dim // 2),
                "BLOCK_HEADS": power_of_two(block.heads),
                "BLOCK_KV_HEADS": power_of_two(block.kv_heads),
                "WHOLE": block.whole_qk_norm,
                "GATED": features > block.qkv_features,
                "STRIDE": options.block_seq_stride,
                "ROW": self._row,
                "EPS": self._spec.rms_norm_eps,
            },
            grid=[Tiles("tokens")],
            tuning=Tuning(num_waves=4),
        )

    def _reads(self, slab: Slab) -> dict[str, Buffer]:
        return {
            "q": buffer(self._options.query_dtype, "tokens", self._query_features),
            "cache": pages_of(slab),
            **{name: buffer("i64", "rows") for name in ("offsets", "starts", "seq_lens")},
            "blocks": buffer("i64", "rows", "width"),
            **({"sinks": buffer("f32", self._block.heads)} if self._block.sinks else {}),
        }

    @property
    def _out(self) -> Buffer:
        return buffer(self._options.activations, "tokens", self._features)

    @property
    def _features(self) -> int:
        return self._block.q_features

    @property
    def _query_features(self) -> int:
        return self._features + self._block.heads * (self._tail or 0)

    @property
    def _tile(self) -> AttentionTile:
        return self._fitted(self._tiles.attention)

    @property
    def _decode_tile(self) -> AttentionTile:
        tile = self._fitted(self._tiles.decode_attention)
        return replace(tile, columns=self._tile.columns) if self._options.batch_invariant else tile

    def _fitted(self, tile: AttentionTile) -> AttentionTile:
        head_bytes = self._block.head_dim * kv_dtype(self._options.query_dtype).itemsize
        return fitted(tile, self._sharing, head_bytes)

    def _constexprs(self, tile: AttentionTile, slab: Slab) -> dict[str, int | float | None]:
        block, stride = self._block, self._options.block_seq_stride
        return {
            "HEADS": block.heads,
            "KV_HEADS": block.kv_heads,
            "HEAD_DIM": block.head_dim,
            "BLOCK_DIM": max(16, power_of_two(block.head_dim)),
            "STRIDE": stride,
            "PAGE_ROWS": slab.page_rows(stride),
            "ROW": self._row,
            "QUERIES": tile.queries,
            "COLUMNS": tile.columns,
            "WINDOW": block.window,
            "CAP": block.cap,
            "SHARES": bool(self._options.batch_invariant),
            "SPLIT": self.split,
            "MOST_SPLITS": self.splits,
            "TAIL": self._tail,
            "BLOCK_TAIL": self._tail and max(16, power_of_two(self._tail)),
            **({} if block.sinks else {"sinks": None}),
        }


def pages_of(slab: Slab) -> Buffer:
    """Return the buffer of a kernel that describes the slab's pages."""
    _, elements = slab.cache.shape
    assert isinstance(elements, int)
    return buffer(slab.cache.dtype, "pages", elements)


def _suffix(window: int | None) -> str:
    """Return a suffix for the names of kernels."""
    return "" if window is None else "_window"
