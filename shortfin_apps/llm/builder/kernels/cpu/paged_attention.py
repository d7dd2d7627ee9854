"""Geometry of paged_attention.mlir.j2."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.cpu.kv_pages import KvPages
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.weights.layout import LANES

_CACHE_LINE_BYTES = 64
# Pages per step: the same for every kind of tile, as the bits of a softmax depend on its step boundaries.
_STEP_PAGES = 4


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """A kind of tile: query tokens that share each load of K and V.

    `tokens`: maximum number of query tokens. `queries`: `tokens` times the query heads per K/V head. A step
    of the softmax covers `step_pages` pages of `stride` slots. The step loads K of `score_pages` pages at a
    time, and `dim_tile` elements of a head's V at a time.
    """

    tokens: int
    queries: int
    score_pages: int
    stride: int
    dim_tile: int

    @property
    def step_pages(self) -> int:
        return _STEP_PAGES

    @property
    def span(self) -> int:
        """Slots of a step."""
        return self.step_pages * self.stride

    @property
    def score_rounds(self) -> list[range]:
        """The pages of a step in groups; K of a group's pages is loaded together."""
        firsts = range(0, self.step_pages, self.score_pages)
        return [range(first, min(first + self.score_pages, self.step_pages)) for first in firsts]

    @property
    def prefetches(self) -> bool:
        """Whether to prefetch pages: a decode reads each page once, at scattered addresses."""
        return self.tokens == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttentionGeometry(KvPages):
    """Attention of q [tokens, q_features] f32 over KV pages; the result is `dtype`."""

    dtype: str
    has_wide_vectors: bool
    window: int | None = None  # number of last slots that a query attends to; None: all
    score_cap: float | None = None  # a score is cap * tanh(score / cap)
    has_sinks: bool = False  # the softmax of each head includes one more score, with value 0

    @property
    def score_scale(self) -> float:
        """The factor of scores: 1 / sqrt(head_dim) times log2(e), as exp(x) = exp2(x * log2(e)).

        With a cap, the factor is 1 / (cap * sqrt(head_dim)), for the cap's tanh.
        """
        return (math.log2(math.e) if self.score_cap is None else 1 / self.score_cap) / math.sqrt(
            self.head_dim
        )

    @property
    def capped_scale(self) -> float:
        """The factor of the cap's tanh: cap * log2(e).

        Softmax weights are then powers of 2 of the scores.
        """
        assert self.score_cap is not None
        return self.score_cap * math.log2(math.e)

    @property
    def line_elements(self) -> int:
        """Elements of K or V per cache line."""
        return _CACHE_LINE_BYTES // {"f32": 4, "i8": 1}.get(self.kv_dtype, 2)

    @property
    def tile_tokens(self) -> int:
        """Maximum query tokens per tile; a divisor of the page's slots.

        About 12 queries (with AVX-512, otherwise 4) share a load of K or V.
        """
        wanted = max(1, (12 if self.has_wide_vectors else 4) // self.group)
        return math.gcd(self.stride, 1 << (wanted.bit_length() - 1))

    @property
    def tiles(self) -> list[AttentionTile]:
        """The kinds of tile in the kernel: of one token, as in a decode, and of several."""
        return [self._tile(tokens) for tokens in sorted({1, self.tile_tokens})]

    def _tile(self, tokens: int) -> AttentionTile:
        queries = tokens * self.group
        # Accumulators per query for which registers suffice.
        spare = max(1, (24 if self.has_wide_vectors else 8) // queries)
        score_pages = min(_STEP_PAGES, spare)
        # A power of two, as LLVM takes other vectors of 16-bit floats apart, element by element.
        dim_tile = math.gcd(self.head_dim, LANES << (spare.bit_length() - 1))
        return AttentionTile(tokens, queries, score_pages, self.stride, dim_tile)

    @property
    def interface(self) -> Interface:
        per_token = {name: buffer("i64", "tokens") for name in ("token_rows", "positions", "tiles")}
        return Interface(
            constants=self.constants,
            reads={
                "q": buffer("f32", "tokens", self.q_features),
                **per_token,
                **self.batch,
                **({"sinks": buffer("f32", self.q_heads)} if self.has_sinks else {}),
                "cache": self.cache,
            },
            writes={"out": buffer(self.dtype, "tokens", self.q_features)},
        )
