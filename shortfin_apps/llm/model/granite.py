"""Granite's four scalars, expressed in values of the spec."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
        scores = 1.0 if self.attention is None else self.attention * spec.head_dim**0.5
        made = replace(
            spec,
            embedding_scale=self.embedding / self.residual,
            rms_norm_eps=spec.rms_norm_eps / self.residual**2,
            score_scale=scores,
            logit_scale=1 / self.logits,
        )
        scales = (made.embedding_scale, made.rms_norm_eps, made.score_scale, made.logit_scale)
        if not all(map(math.isfinite, scales)):
            raise OverflowError("a multiplier is out of range")
        return made
