"""What differs between targets: the operations of the graph that have a hand-written and a generic form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shortfin_apps.llm.build.graph_text import Dim, Emitter, Tensor


@dataclass(slots=True)
class Batch:
    """What one invocation works on: the tokens of its rows, end to end (see graph_geometry.py).

    `cache` is replaced by every operation that writes to it: always use the newest.
    """

    rows: Dim
    tokens: Dim
    chunk: Dim | None  # tokens of every row; None where each row has its own number
    whole_pages: bool  # every row's tokens, padding included, fill whole pages
    starts: Tensor  # [rows] i64
    seq_lens: Tensor  # [rows] i64
    blocks: Tensor  # [rows, width] i64
    cache: Tensor  # [pages, page elements] kv
    offsets: Tensor  # [rows] i64: each row's first token
    token_rows: Tensor  # [tokens] i64
    positions: Tensor  # [tokens] i64
    rotary: Tensor  # [tokens, 2, head_dim / 2] f32: cosines, sines
    # Made by the form that wants them, at the first layer, for all layers.
    tiles: Tensor | None = None
    slots: Tensor | None = None
    slots_of_rows: Tensor | None = None
    mask: Tensor | None = None

    @property
    def width(self) -> Dim:
        return self.blocks.shape[1]

    @property
    def pages(self) -> Dim:
        return self.cache.shape[0]


class Form(Protocol):
    """Activations are `[tokens, features]`.

    A weight is named as in LlamaSpec. Every operation may be called in several functions of the module.
    """

    def embedding(self, e: Emitter, tokens: Tensor) -> Tensor:
        """[tokens] i64 -> [tokens, hidden] f32; ids out of range read the table's last row, not past it."""
        ...

    def project(self, e: Emitter, x: Tensor) -> Tensor:
        """x [tokens, hidden] f32 -> the first layer's q, k and v [tokens, qkv features] f32."""
        ...

    def layer(
        self, e: Emitter, x: Tensor, qkv: Tensor, number: int, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x [tokens, hidden] f32 and its q, k and v, as of `project` -> x past the layer, and the next
        layer's q, k and v, None after the last. This layer's k and v go to the cache."""
        ...

    def logits(self, e: Emitter, x: Tensor) -> Tensor:
        """x [rows, hidden] f32 past all layers -> [rows, vocab] f32."""
        ...

    def top_k(self, e: Emitter, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, vocab] f32 -> values [rows, k] f32, indices [rows, k] i64; ties by lower index."""
        ...

    def declarations(self) -> list[str]:
        """What the module must hold for the operations emitted so far."""
        ...
