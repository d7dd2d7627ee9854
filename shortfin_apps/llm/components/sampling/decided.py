"""Decides rows from their candidates alone, although an adjustment may change any logit.

An adjustment that only makes tokens less likely leaves every non-candidate at most as likely as the last
candidate was, and after it on a tie. Therefore the candidates that stay ahead of that value are the best of
the full row, and its logits need not be fetched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.adjustments import (
    Adjustment,
    OutputGrammar,
    allowed_next,
    within_bitmask,
)
from shortfin_apps.llm.components.sampling.candidates import Candidates

FEW = 8  # first tried with this many candidates more than are sampled from: mostly enough, in half the time


def deciding_candidates(
    row: Candidates, request: Request, adjustments: Sequence[Adjustment], ahead: Sequence[int] = ()
) -> Candidates | None:
    """Returns the adjusted candidates if the sampled ones are the best of the full row, else None.

    After proposed tokens `ahead`, only a grammar can be applied. None means that the full row is needed.
    Raises ConstraintError when the grammar fails.
    """
    others = [each for each in adjustments if not isinstance(each, OutputGrammar)]
    if ahead and others:
        return None
    bitmask = allowed_next(request, ahead) if len(others) < len(adjustments) else None
    if bitmask is not None and not others and (forced := _only_token(bitmask)) is not None:
        return forced
    params = request.call.params
    num_sampled = 1 if params.greedy else params.top_k
    if not num_sampled or any(each.raises_any(params) for each in others):
        return None
    for some in (row.first(num_sampled + FEW), row):
        left = some
        for each in others:
            left = each.apply(left, request)
        left = left if bitmask is None else within_bitmask(left, bitmask)
        if _are_best(left, num_sampled, some):
            return left
    return None


def _only_token(bitmask: bytes) -> Candidates | None:
    """Returns the only token in the bitmask, with an arbitrary logit, or None if there are several."""
    octets = np.frombuffer(bitmask, np.uint8)
    where = np.flatnonzero(octets)
    if len(where) != 1 or (octet := int(octets[where[0]])) & (octet - 1):
        return None
    return Candidates(np.zeros(1, np.float32), where * 8 + octet.bit_length() - 1, None)


def _are_best(left: Candidates, count: int, row: Candidates) -> bool:
    """Returns True if the first `count` of `left` come before every token that is no candidate of `row`."""
    if len(left.values) < count:
        return False
    last, least = left.values[count - 1], row.values[-1]
    if last == least:  # ties are ordered by id: a candidate lowered to this value may come too late
        last_token_id = left.token_ids[count - 1]
        return bool(last > -np.inf and row.values[row.token_ids == last_token_id][0] == least)
    return bool(last > least)
