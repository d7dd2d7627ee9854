"""Granite's four scalars, expressed in values of the spec."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.block import Block
from shortfin_apps.llm.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """`attention` multiplies scores instead of 1 / sqrt(head_dim); `logits` divides logits."""

    embedding: float = 1.0
    residual: float = 1.0
    attention: float | None = None
    logits: float = 1.0

    def applied(self, spec: ModelSpec) -> ModelSpec:
        """Apply the multipliers to the spec, with the residual stream stored divided by `residual`.

        Layers then add to it without a factor, and its norms give the same values with an epsilon divided by
        residual squared. Raises ArithmeticError for multipliers that give infinite values.
        """
        layers = tuple(tuple(map(self._scaled, layer)) for layer in spec.layers)
        scores = [each.score_scale for each in replace(spec, layers=layers).blocks_of(Attention)]
        made = replace(
            spec,
            embedding_scale=self.embedding / self.residual,
            rms_norm_eps=spec.rms_norm_eps / self.residual**2,
            layers=layers,
            logit_scale=1 / self.logits,
        )
        scales = (made.embedding_scale, made.rms_norm_eps, *scores, made.logit_scale)
        if not all(map(math.isfinite, scales)):
            raise OverflowError("a multiplier is out of range")
        return made

    def _scaled(self, block: Block) -> Block:
        if self.attention is None or not isinstance(block, Attention):
            return block
        return replace(block, score_scale=self.attention * block.head_dim**0.5)
