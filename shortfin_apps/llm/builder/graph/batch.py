"""The batch of one invocation, for the code that emits operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shortfin_apps.llm.builder.graph.emitter import Dim, Tensor
from shortfin_apps.llm.contract.config import Pool
from shortfin_apps.llm.model.attention import QueryScaling
from shortfin_apps.llm.model.rope import Rotation


@dataclass(slots=True, kw_only=True, repr=False)
class Slab:
    """The slab of a pool: the KV pages of the pool's layers, and the block table that addresses these pages.

    An operation that writes to the pages assigns a new tensor to `cache`, so callers must read `cache` anew
    for each operation. The names of kernels that depend on the slab end in `suffix`.
    """

    pool: Pool
    layers: Sequence[int]
    blocks: Tensor  # [rows, width] i64
    cache: Tensor  # [pages, page elements] in the KV type
    suffix: str = ""
    planes: int = 2  # cache rows per token and layer (KeysValues.planes)
    slots: Tensor | None = None  # [tokens] i64: see token_layout.cache_slots

    def page_rows(self, stride: int) -> int:
        """Return the cache rows of a page of `stride` tokens."""
        return self.planes * stride * len(self.layers)


@dataclass(slots=True, kw_only=True, repr=False)
class Batch:
    """The batch of one invocation: the tokens of its rows (sequences), end to end (see token_layout.py).

    `Lowering.prepare` computes the fields that are not arguments of the entry, if kernels of the target read
    them. Callers must call `turn_to` before each layer: it selects the layer's slab (`blocks`, `cache`,
    `slots`) and rotation (`rotary`).
    """

    rows: Dim
    tokens: Dim
    chunk: Dim | None  # tokens in every row; None if rows differ in length
    whole_pages: bool  # every row's tokens, including padding, fill complete pages
    starts: Tensor  # [rows] i64
    seq_lens: Tensor  # [rows] i64
    slabs: Sequence[Slab]
    given_offsets: Tensor | None = None  # [rows] i64: `offsets`, if chunk is None
    followers: Tensor | None = None  # [rows] i64 (abi.py); None if no row continues another
    offsets: Tensor = field(init=False)  # [rows] i64: index of each row's first token
    token_rows: Tensor = field(init=False)  # [tokens] i64
    positions: Tensor = field(init=False)  # [tokens] i64
    rotaries: dict[Rotation, Tensor] = field(init=False)  # [tokens, 2, head_dim / 2] f32: cosines, sines
    rotation: Rotation | None = field(default=None, init=False)  # of the current layer
    slab: Slab = field(init=False)  # of the current layer
    # Computed once for all layers, at the first layer at the latest, if kernels need them.
    counters: Tensor | None = None  # [rows, kv_heads] i32: zero between dispatches
    barrier: Tensor | None = None  # [1] i32: zero before the one launch of a decode
    compute_units: int | None = field(default=None, init=False)  # that one launch needs, once it is emitted
    token_slots: dict[int | None, Tensor] = field(default_factory=dict, init=False)  # keyed by window
    masks: dict[int | None, Tensor] = field(default_factory=dict, init=False)
    tiles: dict[int, Tensor] = field(default_factory=dict, init=False)  # keyed by a tile's tokens
    query_factors: dict[QueryScaling, Tensor] = field(default_factory=dict, init=False)  # [tokens] f32

    def __post_init__(self) -> None:
        self.slab = self.slabs[0]

    def turn_to(self, layer: int, rotation: Rotation | None = None) -> None:
        """Select the slab and rotation of a layer."""
        self.rotation = rotation
        self.slab = next(slab for slab in self.slabs if layer in slab.layers)

    def turn_to_all_tokens(self) -> None:
        """Select the slab in which every token has a page, so that a slot in page 0 identifies padding."""
        self.slab = self.slabs[0]

    def place_of(self, layer: int) -> int:
        """Return the layer's index in the current slab."""
        return self.slab.layers.index(layer)

    def page_rows(self, stride: int) -> int:
        """Return the cache rows of a page in the current slab."""
        return self.slab.page_rows(stride)

    @property
    def rotary(self) -> Tensor:
        """RoPE cosines and sines of the current layer, [tokens, 2, head_dim / 2] f32."""
        assert self.rotation is not None
        return self.rotaries[self.rotation]

    @property
    def blocks(self) -> Tensor:
        """Block table of the current slab, [rows, width] i64."""
        return self.slab.blocks

    @property
    def cache(self) -> Tensor:
        """KV pages of the current slab, [pages, page elements]."""
        return self.slab.cache

    @cache.setter
    def cache(self, written: Tensor) -> None:
        self.slab.cache = written

    @property
    def slots(self) -> Tensor | None:
        """Cache row of each token's key in the current slab, [tokens] i64 (token_layout.cache_slots)."""
        return self.slab.slots

    @slots.setter
    def slots(self, computed: Tensor | None) -> None:
        self.slab.slots = computed

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
