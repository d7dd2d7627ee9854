"""EAGLE-3 (arXiv:2503.01840): a draft layer that was trained for a finished model.

It differs from a model's own draft layer in its inputs and its vocabulary:

    hidden(q)  = projection of the residual stream at q after some main layers (`depths`), side by side; in
                 later rounds of a draft, the head's result before its norm
    q, k, v    = projections of (norm of embedding(q), norm of hidden(q - 1)), side by side
    residual   = hidden(q - 1)

The projection to hidden states is stored as one matrix per depth, whose products are added. So a main layer's
result is read where it is computed, and nothing is kept or joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from shortfin_apps.llm.contract.abi import NO_LOGIT
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.block import ReferenceLayer
from shortfin_apps.llm.model.draft_layer import (
    EMBEDDING_NORM,
    HIDDEN_NORM,
    RESULT_NORM,
    HiddenDraft,
    NormHidden,
)
from shortfin_apps.llm.model.operations import Linear, ModelTensor, Narrow, Operation
from shortfin_apps.llm.model.reference.pointwise import F32

HEAD = "nextn.shared_head_head.weight"
# For each token of the model, the row of HEAD with its logit, or -1. Stored as f32, like all vectors: it has
# integers up to 2^24 exactly.
HEAD_ROWS = "nextn.head_rows.weight"
# With HEAD_ROWS, HEAD has a multiple of as many rows, the last ones 0. Otherwise kernels for CPUs pad their
# result, and IREE 3.9 compiles PlaceLogits to read the slice of it at the distance of unpadded rows.
ROW_ALIGNMENT = 32


def depth_weight(index: int) -> str:
    """Return the name of the projection from the residual stream after `depths[index]` layers."""
    return f"nextn.fc.{index}.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleHead(HiddenDraft):
    """An EAGLE-3 head: an attention without norm, and a feed-forward; it shares the model's embedding.

    `reads`: see `HiddenDraft.depths`, in the order of the file's projection; `vocab_size`: the model's;
    `head_rows`: rows of the head's own output projection, or None if it shares the model's; `maps_rows`:
    whether the rows are other tokens than the model's (HEAD_ROWS); `norm_before_residual`: the residual is
    the hidden state after its norm.
    """

    reads: tuple[int, ...]
    vocab_size: int
    head_rows: int | None = None
    maps_rows: bool = False
    norm_before_residual: bool = False

    @property
    def depths(self) -> tuple[int, ...]:
        return self.reads

    @property
    def attention(self) -> Attention:
        assert isinstance(self.blocks[0], Attention), "its first block"
        return self.blocks[0]

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        for index in range(len(self.reads)):
            yield ModelTensor(depth_weight(index), (hidden, hidden))
        yield ModelTensor(EMBEDDING_NORM, (hidden,))
        yield ModelTensor(HIDDEN_NORM, (hidden,))
        for tensor in self.attention.tensors(hidden):
            if tensor.weight == "attn_qkv.weight":
                tensor = replace(tensor, shape=(tensor.shape[0], 2 * hidden))
            yield tensor
        for block in self.blocks[1:]:
            yield from block.tensors(hidden)
        yield ModelTensor(RESULT_NORM, (hidden,))
        if self.head_rows is not None:
            yield ModelTensor(HEAD, (self.head_rows, hidden))
        if self.maps_rows:
            yield ModelTensor(HEAD_ROWS, (self.vocab_size,))

    def head(self, layer: int, model_head: str) -> str:
        return model_head if self.head_rows is None else f"blk.{layer}.{HEAD}"

    def read_operations(self, layer: int, depth: int, x: str) -> Iterator[Operation]:
        for index, each in enumerate(self.reads):
            if each == depth:
                residual = None if depth == min(self.reads) and index == self.reads.index(depth) else "hidden"
                yield Narrow(x, "narrow_stream")
                yield Linear("narrow_stream", "hidden", f"blk.{layer}.{depth_weight(index)}", residual)

    def known_hidden(self, weights: Mapping[str, F32], streams: Mapping[int, F32], result: F32) -> F32:
        products = [streams[each] @ weights[depth_weight(i)].T for i, each in enumerate(self.reads)]
        hidden: F32 = np.sum(products, axis=0)
        return hidden

    def compute(self, embedded: F32, previous: F32, its: ReferenceLayer) -> tuple[F32, F32]:
        normed = its.normed(previous, HIDDEN_NORM)
        joined = np.concatenate([its.normed(embedded, EMBEDDING_NORM), normed], axis=1)
        x = normed if self.norm_before_residual else previous
        x = x + self.attention.attended(joined, its)
        for block in self.blocks[1:]:
            x = x + block.compute(x, its)
        return its.normed(x, RESULT_NORM), x

    def place(self, logits: F32, weights: Mapping[str, F32]) -> F32:
        if not self.maps_rows:
            return logits
        rows = weights[HEAD_ROWS].astype(np.int64)
        placed: F32 = np.where(rows >= 0, logits[:, np.maximum(rows, 0)], np.float32(NO_LOGIT))
        return placed

    def _layer(self, layer: int) -> Iterator[Operation]:
        yield from self._join(layer)
        residual = "residual" if self.norm_before_residual else "previous"
        if self.norm_before_residual:
            yield NormHidden("previous", residual, f"blk.{layer}.{HIDDEN_NORM}")
        _, projection, *others = self.attention.operations(layer, residual, "sum")
        assert isinstance(projection, Linear), "after the conversion to activations"
        yield replace(projection, x="joined")
        yield from others
        for index, block in enumerate(self.blocks[1:], 2):
            yield from block.operations(layer, "sum", "draft" if index == len(self.blocks) else "sum")

    def _logits(self, layer: int, head: str) -> Iterator[Operation]:
        if not self.maps_rows:
            yield from HiddenDraft._logits(self, layer, head)
            return
        yield Linear("normed", "head_logits", head)
        yield PlaceLogits("head_logits", "logits", f"blk.{layer}.{HEAD_ROWS}", self.vocab_size)


@dataclass(frozen=True, slots=True)
class PlaceLogits(Operation):
    """Logits of a head's rows [rows, head rows] f32 -> logits of the model's tokens [rows, vocab] f32.

    `weight` [vocab] f32 has the head's row of each token, or -1 for a token that gets NO_LOGIT.
    """

    weight: str
    vocab_size: int
