"""Scores of routed experts other than a softmax over all of them, as in DeepSeek-V2 and V3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shortfin_apps.llm.model.operations import Operation
from shortfin_apps.llm.model.reference.pointwise import F32


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertScores:
    """How router logits become scores, and which scores compete for a token.

    A score is the sigmoid of the logit, or the softmax over all logits. Consecutive experts form `groups` of
    equal size. Only experts in the best `kept_groups` can be chosen: groups with the largest sums of their
    `summed` best scores. A `bias` of each expert is added to scores for the choice only.
    """

    is_sigmoid: bool
    bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    summed: int = 1

    @property
    def limits_groups(self) -> bool:
        return self.kept_groups < self.groups

    def scores(self, logits: F32) -> F32:
        """Return the scores of router logits, both [tokens, experts]."""
        if self.is_sigmoid:
            sigmoid: F32 = np.reciprocal(1 + np.exp(-logits))
            return sigmoid
        powers: F32 = np.exp(logits - logits.max(axis=-1, keepdims=True))
        softmax: F32 = powers / powers.sum(axis=-1, keepdims=True)
        return softmax

    def preferences(self, scores: F32, bias: F32 | None) -> F32:
        """Return by how much each expert is preferred [tokens, experts]; -inf: it cannot be chosen."""
        preferred = scores if bias is None else scores + bias
        if not self.limits_groups:
            return preferred
        grouped = preferred.reshape(len(scores), self.groups, -1)
        ranks = np.sort(grouped, axis=-1)[:, :, -self.summed :].sum(axis=-1)
        best = np.argsort(-ranks, axis=-1, kind="stable")[:, : self.kept_groups]
        is_kept = np.zeros(ranks.shape, bool)
        np.put_along_axis(is_kept, best, values=True, axis=-1)
        kept: F32 = np.where(is_kept[:, :, None], grouped, np.float32(-np.inf))
        return kept.reshape(scores.shape)


@dataclass(frozen=True, slots=True)
class ScoreExperts(Operation):
    """Router logits [tokens, experts] f32 -> scores of the same shape and type (ExpertScores.scores)."""

    by: ExpertScores


@dataclass(frozen=True, slots=True)
class PreferExperts(Operation):
    """Scores [tokens, experts] f32 -> the same shape and type (ExpertScores.preferences).

    `weight` [experts] f32: the name of the bias, or None.
    """

    READS: ClassVar = ("x",)
    by: ExpertScores
    weight: str | None
