"""What differs between targets: the operations of the graph that have a hand-written and a generic form."""

from __future__ import annotations

from typing import Protocol

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor


class Lowering(Protocol):
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
