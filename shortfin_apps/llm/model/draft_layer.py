"""Draft layers: predict the token after the next one from hidden states of the main layers.

A draft layer is one more attention layer, with keys and values in the pages of the main layers. Its input at
position q is the hidden state of the token at q - 1 and the embedding of the token at q, so a page depends
only on the tokens up to its last one, like the main layers' pages. In later rounds of a draft, the hidden
state is the result of the draft layer itself.

Entries of the main layers store the draft layer's keys and values of their tokens (`store_operations`). The
entries `draft` run the full layer on one token per row (`operations`). Both keep hidden states in a table on
the device, by row (contract/abi.py).

`HiddenDraft` is the base of two kinds: the model's own layer (`DraftLayer`, multi-token prediction), and a
head that was trained for the finished model (`EagleHead` in eagle_head.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from shortfin_apps.llm.model.attention import Attend
from shortfin_apps.llm.model.block import Block, ReferenceLayer
from shortfin_apps.llm.model.latent_attention import AttendLatent
from shortfin_apps.llm.model.operations import Embed, Linear, ModelTensor, Norm, Operation
from shortfin_apps.llm.model.reference.pointwise import F32

EMBEDDING_NORM = "nextn.enorm.weight"
HIDDEN_NORM = "nextn.hnorm.weight"
PROJECTION = "nextn.eh_proj.weight"
RESULT_NORM = "nextn.shared_head_norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenDraft(ABC):
    """A layer that drafts from hidden states: its blocks, of which the first is attention."""

    blocks: tuple[Block, ...]

    def within(self, context: int) -> Self:
        """Return the layer for sequences of at most `context` tokens."""
        return replace(self, blocks=tuple(block.within(context) for block in self.blocks))

    @property
    def depths(self) -> tuple[int, ...]:
        """Numbers of main layers after which the layer reads the residual stream."""
        return ()

    @abstractmethod
    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors, with names without `blk.N.`."""

    @abstractmethod
    def head(self, layer: int, model_head: str) -> str:
        """Return the name of the output projection's weight; `model_head` is the main layers' name."""

    def read_operations(self, layer: int, depth: int, x: str) -> Iterator[Operation]:
        """List the operations on the residual stream `x` after the first `depth` main layers."""
        yield from ()

    def store_operations(self, layer: int, x: str) -> Iterator[Operation]:
        """List the operations that store keys and values, given the main layers' result `x`."""
        yield from self._hidden(x)
        yield HiddenBefore("known_hidden", "previous", "hidden")
        for operation in self._layer(layer):
            if isinstance(operation, Attend | AttendLatent):
                yield replace(operation, only_stores=True)
                break
            yield operation
        yield KeepHidden("hidden", "hidden_table", operation.out)

    def operations(self, layer: int, model_head: str) -> Iterator[Operation]:
        """List the operations from the value `tokens` [rows] i64 to `logits` [rows, vocab] f32."""
        yield HiddenBefore("known_hidden", "previous")
        yield from self._layer(layer)
        yield from self._result(layer, f"blk.{layer}.{RESULT_NORM}")
        yield from self._logits(layer, self.head(layer, model_head))

    @abstractmethod
    def known_hidden(self, weights: Mapping[str, F32], streams: Mapping[int, F32], result: F32) -> F32:
        """Compute in numpy the hidden states [tokens, hidden] of tokens that the main layers have computed.

        `weights`: of the layer, by names without `blk.N.`; `streams`: depth -> the residual stream after so
        many main layers; `result`: the last one's after the norm.
        """

    @abstractmethod
    def compute(self, embedded: F32, previous: F32, its: ReferenceLayer) -> tuple[F32, F32]:
        """Compute in numpy the head's input and the hidden states for the next round, [tokens, hidden].

        `embedded`, `previous`: the tokens' embeddings, and the hidden states of the tokens before.
        """

    def place(self, logits: F32, weights: Mapping[str, F32]) -> F32:
        """Return the head's result as logits of the model's vocabulary, [tokens, vocab]."""
        return logits

    def _hidden(self, x: str) -> Iterator[Operation]:
        """List the operations that make the value `hidden` of the main layers' result `x`."""
        yield from ()

    @abstractmethod
    def _layer(self, layer: int) -> Iterator[Operation]:
        """List the operations from `tokens` and `previous` to the layer's result `draft`."""

    def _result(self, layer: int, norm: str) -> Iterator[Operation]:
        """List the operations that keep the hidden state of the result `draft`, and make `normed` of it."""
        yield KeepHidden("draft", "hidden_table", "draft")
        yield Norm("draft", "normed", norm)

    def _logits(self, layer: int, head: str) -> Iterator[Operation]:
        """List the operations from `normed` to `logits`."""
        yield Linear("normed", "logits", head)

    def _join(self, layer: int) -> Iterator[Operation]:
        """List the operations that make `joined` of `tokens` and `previous`."""
        prefix = f"blk.{layer}."
        yield Embed("tokens", "embedded", "token_embd.weight")
        yield JoinHidden(
            "embedded", "joined", "previous", f"{prefix}{EMBEDDING_NORM}", f"{prefix}{HIDDEN_NORM}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayer(HiddenDraft):
    """The model's own draft layer, which shares the embedding and the head of the main layers.

    Its input is a projection of both norms; the hidden state is the result of the main layers after their
    norm. `keeps_normed`: the next round of a draft gets the layer's result after its norm.
    """

    keeps_normed: bool = True

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        yield ModelTensor(EMBEDDING_NORM, (hidden,))
        yield ModelTensor(HIDDEN_NORM, (hidden,))
        yield ModelTensor(PROJECTION, (hidden, 2 * hidden))
        for block in self.blocks:
            yield from block.tensors(hidden)
        yield ModelTensor(RESULT_NORM, (hidden,))

    def head(self, layer: int, model_head: str) -> str:
        return model_head

    def known_hidden(self, weights: Mapping[str, F32], streams: Mapping[int, F32], result: F32) -> F32:
        return result

    def compute(self, embedded: F32, previous: F32, its: ReferenceLayer) -> tuple[F32, F32]:
        parts = [its.normed(embedded, EMBEDDING_NORM), its.normed(previous, HIDDEN_NORM)]
        x: F32 = np.concatenate(parts, axis=1) @ its.weights[PROJECTION].T
        for block in self.blocks:
            x = x + block.compute(x, its)
        normed = its.normed(x, RESULT_NORM)
        return normed, normed if self.keeps_normed else x

    def _hidden(self, x: str) -> Iterator[Operation]:
        yield NormHidden(x, "hidden", "output_norm.weight")

    def _layer(self, layer: int) -> Iterator[Operation]:
        yield from self._join(layer)
        yield Linear("joined", "draft", f"blk.{layer}.{PROJECTION}")
        for index, block in enumerate(self.blocks):
            x, out = "sum" if index else "draft", "draft" if index == len(self.blocks) - 1 else "sum"
            yield from block.operations(layer, x, out)

    def _result(self, layer: int, norm: str) -> Iterator[Operation]:
        if self.keeps_normed:
            yield NormHidden("draft", "hidden", norm)
        yield KeepHidden("hidden" if self.keeps_normed else "draft", "hidden_table", "draft")
        yield Norm("draft", "normed", norm)


@dataclass(frozen=True, slots=True)
class NormHidden(Operation):
    """RMS norm: [tokens, hidden] f32 -> the same shape, f32."""

    weight: str


@dataclass(frozen=True, slots=True)
class HiddenBefore(Operation):
    """The hidden state of the token before each one: `out` [tokens, hidden] f32.

    `x` [hidden rows, hidden] f32 is the table of hidden states. `hidden` [tokens, hidden] f32 has this
    invocation's states; None: each row of the batch has one token, and none follows another. `source` [rows]
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
