"""Chooses a token from the candidates alone, even if an adjustment may change any logit of the row.

If no adjustment raises a logit, every non-candidate stays at or below the original logit of the last
candidate, and ranks after this candidate in a tie. Therefore candidates that stay above this value when
adjusted are the best tokens of the full row, and the row's `logits` need not be fetched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shortfin_apps.llm.components.request.grammar import Bitmask
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.adjustments import (
    Adjustment,
    OutputGrammar,
    allowed_next,
    within_bitmask,
)
from shortfin_apps.llm.components.sampling.candidates import Candidates

FEW = 8  # extra candidates of the first attempt, beyond the sampled ones: mostly enough, in half the time


def deciding_candidates(
    row: Candidates, request: Request, adjustments: Sequence[Adjustment], ahead: Sequence[int] = ()
) -> Candidates | None:
    """Return the adjusted candidates, or None if the full row is needed to choose the next token.

    The candidates that sampling then considers (the best one, or the best `top_k`) are the best of the full
    row. After proposed tokens `ahead`, a grammar is the only adjustment that can be applied; with any other,
    None is returned. Raises ConstraintError when the grammar fails.
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


def _only_token(bitmask: Bitmask) -> Candidates | None:
    """Return the token as a candidate with an arbitrary logit if the bitmask has exactly one, else None."""
    octets = np.frombuffer(bitmask, np.uint8)
    where = np.flatnonzero(octets)
    if len(where) != 1 or (octet := int(octets[where[0]])) & (octet - 1):
        return None
    return Candidates(np.zeros(1, np.float32), where * 8 + octet.bit_length() - 1, None)


def _are_best(left: Candidates, count: int, row: Candidates) -> bool:
    """Return whether the first `count` of `left` rank before every token that is not a candidate of `row`."""
    if len(left.values) < count:
        return False
    last, least = left.values[count - 1], row.values[-1]
    if last == least:  # ties rank by ID: a non-candidate may precede a candidate lowered to this value
        last_token_id = left.token_ids[count - 1]
        return bool(last > -np.inf and row.values[row.token_ids == last_token_id][0] == least)
    return bool(last > least)
