"""Adjustments: the first step of sampling, which changes the logits of some tokens before the filters.

To add one: its field in SamplingParams, a class here, and its place in `adjustments`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.sampling.candidates import Candidates

WHOLE_ROW = math.inf


class Adjustment(ABC):
    """A change to one row's logits. `param` is the request's field that asks for it, named in errors."""

    param: ClassVar[str]

    @abstractmethod
    def num_lost(self, params: SamplingParams, num_generated: int) -> float:
        """How many of the best candidates it may take away: 0 when it is off, so that `apply` is not called.

        WHOLE_ROW when it may bring in or reorder others, so that candidates never suffice. `apply` may then
        rely on `logits`: a request is refused if the VMFB returns none.
        """

    @abstractmethod
    def apply(self, row: Candidates, request: Request) -> Candidates:
        """The row after the change, in new arrays: its candidates best first, or none beside new `logits`."""


class MinTokens(Adjustment):
    """Bans the tokens that would end a request before its `min_tokens`."""

    param = "min_tokens"

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def num_lost(self, params: SamplingParams, num_generated: int) -> int:
        return len(self._banned(params)) if num_generated < params.min_tokens else 0

    def apply(self, row: Candidates, request: Request) -> Candidates:
        banned = list(self._banned(request.call.params))
        allowed = ~np.isin(row.token_ids, banned)
        logits = row.logits
        if logits is not None:
            logits = logits.copy()
            logits[[token_id for token_id in banned if token_id < len(logits)]] = -np.inf
        return Candidates(row.values[allowed], row.token_ids[allowed], logits)

    def _banned(self, params: SamplingParams) -> frozenset[int]:
        return params.stop_token_ids | self._eos_token_ids


def adjustments(eos_token_ids: frozenset[int]) -> tuple[Adjustment, ...]:
    """Every adjustment, in the order in which they are applied."""
    return (MinTokens(eos_token_ids),)
