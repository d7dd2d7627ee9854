"""The tokens of one invocation, as the operations of the graph see them."""

from __future__ import annotations

from dataclasses import dataclass, field

from shortfin_apps.llm.builder.graph.emitter import Dim, Tensor
from shortfin_apps.llm.builder.model.rope import Rotation


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
    rotaries: dict[Rotation, Tensor] = field(init=False)  # [tokens, 2, head_dim / 2] f32: cosines, sines
    rotation: Rotation = field(default=Rotation.GLOBAL, init=False)  # of the layer at hand
    # Computed for kernels that need them, at the latest at the first layer, for all layers.
    tiles: Tensor | None = None
    slots: Tensor | None = None  # [tokens] i64: see cache_slots
    counters: Tensor | None = None  # [rows, kv_heads] i32: zero between two dispatches
    token_slots: dict[int | None, Tensor] = field(default_factory=dict, init=False)  # by the layers' window
    masks: dict[int | None, Tensor] = field(default_factory=dict, init=False)

    @property
    def rotary(self) -> Tensor:
        """[tokens, 2, head_dim / 2] f32: cosines, sines for the layer at hand."""
        return self.rotaries[self.rotation]

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
