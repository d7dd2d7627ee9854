"""The draft layer of a model (multi-token prediction): predicts the token after the next one.

It is one more attention layer, with keys and values in the pages of the main layers. Its input at position q
is the hidden state of the token at q - 1 and the embedding of the token at q, so a page depends only on the
tokens up to its last one, like the main layers' pages.

    input(q)   = projection of (norm of embedding(q), norm of hidden(q - 1))
    hidden(q)  = the result of the main layers at q, after their norm; in later rounds of a draft, the result
                 of the draft layer itself

Entries of the main layers store the draft layer's keys and values of their tokens (`store_operations`). The
entries `draft` run the full layer on one token per row (`operations`). Both keep hidden states in a table on
the device, by row (contract/abi.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from shortfin_apps.llm.model.attention import Attend
from shortfin_apps.llm.model.block import Block
from shortfin_apps.llm.model.latent_attention import AttendLatent
from shortfin_apps.llm.model.operations import Embed, Linear, ModelTensor, Norm, Operation

EMBEDDING_NORM = "nextn.enorm.weight"
HIDDEN_NORM = "nextn.hnorm.weight"
PROJECTION = "nextn.eh_proj.weight"
RESULT_NORM = "nextn.shared_head_norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayer:
    """The blocks of a draft layer, which shares the embedding and the head of the main layers.

    `keeps_normed`: the next round of a draft gets the layer's result after its norm.
    """

    blocks: tuple[Block, ...]
    keeps_normed: bool = True

    def within(self, context: int) -> DraftLayer:
        """Return the layer for sequences of at most `context` tokens."""
        return replace(self, blocks=tuple(block.within(context) for block in self.blocks))

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors, with names without `blk.N.`."""
        yield ModelTensor(EMBEDDING_NORM, (hidden,))
        yield ModelTensor(HIDDEN_NORM, (hidden,))
        yield ModelTensor(PROJECTION, (hidden, 2 * hidden))
        for block in self.blocks:
            yield from block.tensors(hidden)
        yield ModelTensor(RESULT_NORM, (hidden,))

    def store_operations(self, layer: int, x: str) -> Iterator[Operation]:
        """List the operations that store keys and values, given the main layers' result `x`."""
        yield NormHidden(x, "hidden", "output_norm.weight")
        yield HiddenBefore("known_hidden", "previous", "hidden")
        yield from self._inputs(layer)
        for operation in self.blocks[0].operations(layer, "draft", "draft"):
            if isinstance(operation, Attend | AttendLatent):
                yield replace(operation, only_stores=True)
                break
            yield operation
        yield KeepHidden("hidden", "hidden_table", operation.out)

    def operations(self, layer: int, head: str) -> Iterator[Operation]:
        """List the operations from the value `tokens` [rows] i64 to `logits` [rows, vocab] f32.

        `head` is the name of the output projection's weight.
        """
        yield HiddenBefore("known_hidden", "previous")
        yield from self._inputs(layer)
        for index, block in enumerate(self.blocks):
            x, out = "sum" if index else "draft", "draft" if index == len(self.blocks) - 1 else "sum"
            yield from block.operations(layer, x, out)
        norm = f"blk.{layer}.{RESULT_NORM}"
        if self.keeps_normed:
            yield NormHidden("draft", "hidden", norm)
        yield KeepHidden("hidden" if self.keeps_normed else "draft", "hidden_table", "draft")
        yield Norm("draft", "normed", norm)
        yield Linear("normed", "logits", head)

    def _inputs(self, layer: int) -> Iterator[Operation]:
        """List the operations from `tokens` and `previous` to the layer's input `draft`."""
        prefix = f"blk.{layer}."
        yield Embed("tokens", "embedded", "token_embd.weight")
        yield JoinHidden(
            "embedded", "joined", "previous", f"{prefix}{EMBEDDING_NORM}", f"{prefix}{HIDDEN_NORM}"
        )
        yield Linear("joined", "draft", f"{prefix}{PROJECTION}")


@dataclass(frozen=True, slots=True)
class NormHidden(Operation):
    """RMS norm: [tokens, hidden] f32 -> the same shape, f32."""

    weight: str


@dataclass(frozen=True, slots=True)
class HiddenBefore(Operation):
    """The hidden state of the token before each one: `out` [tokens, hidden] f32.

    `x` [hidden rows, hidden] f32 is the table of hidden states. `hidden` [tokens, hidden] f32 has those of
    this invocation; None: each row of the batch has one token, and none follows another. `source` [rows]
    i64 tells where the hidden state before a row's first token is (`hidden_from` in contract/abi.py).
    """

    READS: ClassVar = ("x", "hidden", "source")
    hidden: str | None = None
    source: str = "hidden_from"


@dataclass(frozen=True, slots=True)
class JoinHidden(Operation):
    """RMS norms of `x` and of `hidden`, both [tokens, hidden] f32, side by side.

    The result is [tokens, 2 * hidden] in the matmuls' activation type.
    """

    READS: ClassVar = ("x", "hidden")
    hidden: str
    weight: str
    hidden_weight: str


@dataclass(frozen=True, slots=True)
class KeepHidden(Operation):
    """Store the hidden state of each row's last token in the table `out` [hidden rows, hidden] f32, in place.

    `x` [tokens, hidden] f32 has the hidden states, and `target` [rows] i64 names a row of the table for each
    row of the batch. `after` [tokens, features] is a value that depends on all reads of the table: the
    write must follow them.
    """

    READS: ClassVar = ("x", "out", "after", "target")
    after: str
    target: str = "hidden_to"
