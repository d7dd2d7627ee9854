"""The tokens of one invocation, as the operations of the graph see them."""

from __future__ import annotations

from dataclasses import dataclass, field

from shortfin_apps.llm.builder.graph.emitter import Dim, Tensor


@dataclass(slots=True, kw_only=True, repr=False)
class Batch:
    """The batch of one invocation: its rows' tokens, end to end (see token_layout.py).

    `cache` is replaced by every operation that writes to it: always use the latest. Fields that are not
    arguments of the invocation are computed by `Lowering.prepare`, as far as the target's kernels read them.
    """

    rows: Dim
    tokens: Dim
    chunk: Dim | None  # tokens of every row; None where each row has its own number
    whole_pages: bool  # every row's tokens, padding included, fill whole pages
    starts: Tensor  # [rows] i64
    seq_lens: Tensor  # [rows] i64
    blocks: Tensor  # [rows, width] i64
    cache: Tensor  # [pages, page elements] kv
    given_offsets: Tensor | None = None  # [rows] i64: `offsets` where chunk is None
    offsets: Tensor = field(init=False)  # [rows] i64: each row's first token
    token_rows: Tensor = field(init=False)  # [tokens] i64
    positions: Tensor = field(init=False)  # [tokens] i64
    rotary: Tensor = field(init=False)  # [tokens, 2, head_dim / 2] f32: cosines, sines for the layer at hand
    is_rotated: bool = field(default=True, init=False)  # whether that layer rotates
    other_rotary: Tensor | None = None  # those for layers that do otherwise, where there are any
    # Computed for kernels that need them, at the latest at the first layer, for all layers.
    tiles: Tensor | None = None
    slots: Tensor | None = None  # [tokens] i64: see cache_slots
    counters: Tensor | None = None  # [rows, kv_heads] i32: zero between two dispatches
    token_slots: Tensor | None = None
    mask: Tensor | None = None

    def turn(self, is_rotated: bool) -> None:
        """Has `rotary` be that of layers which rotate, or of those which do not."""
        if is_rotated != self.is_rotated:
            assert self.other_rotary is not None
            self.rotary, self.other_rotary = self.other_rotary, self.rotary
            self.is_rotated = is_rotated

    @property
    def is_decode(self) -> bool:
        """Whether every row is one token."""
        return self.chunk == 1

    @property
    def width(self) -> Dim:
        return self.blocks.shape[1]

    @property
    def pages(self) -> Dim:
        return self.cache.shape[0]
