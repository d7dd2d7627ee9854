"""Log-probabilities of a row's tokens, from terms that the device computed, or from all logits of the row.

Both follow `sampling_rule.py`, so the results are equal to the bit.
"""

from __future__ import annotations

import math

import numpy as np

from shortfin_apps.llm.components.request.messages import TokenLogprobs
from shortfin_apps.llm.components.sampling.candidates import (
    Candidates,
    Drawn,
    Floats,
    Ints,
    LogprobTerms,
    leading,
)
from shortfin_apps.llm.components.sampling.weights import weights_of_row
from shortfin_apps.llm.contract.abi import TermField
from shortfin_apps.llm.contract.sampling_rule import UNIT_SCALE, WEIGHT_BITS


def row_logprobs(row: Candidates | Drawn, token_id: int, num_top: int) -> TokenLogprobs:
    """Return the log-probabilities of the row's token and of the best `num_top` tokens.

    Callers must pass a row with logits, or a drawn token with terms.
    """
    if isinstance(row, Drawn):
        assert row.terms is not None, "the device computed them"
        return token_logprobs(row.terms, num_top)
    assert row.logits is not None, "they were fetched"
    return token_logprobs(terms_of(row.logits, token_id, num_top), num_top)


def token_logprobs(terms: LogprobTerms, num_top: int) -> TokenLogprobs:
    """Return the log-probabilities, at temperature 1, that `terms` are of."""
    mass, logit, rank, values, token_ids = terms
    best, log_mass = values[0], math.log(mass / (1 << WEIGHT_BITS))
    logprobs = [value - best - log_mass for value in values[:num_top]]
    return TokenLogprobs(logit - best - log_mass, tuple(zip(token_ids, logprobs, strict=False)), rank)


def terms_of(logits: Floats, token_id: int, num_top: int) -> LogprobTerms:
    """Compute the terms of a row of `logits` [V] f32 with its token and the best `num_top` tokens."""
    top = leading(logits, max(num_top, 1))
    values, logit = logits[top], logits[token_id]
    mass = int(weights_of_row(logits, float(values[0]), np.float32(UNIT_SCALE)).sum())
    return LogprobTerms(
        mass, float(logit), 1 + int(np.count_nonzero(logits > logit)), values.tolist(), top.tolist()
    )


def computed_terms(terms: Ints, top_values: Floats, top_indices: Ints) -> list[LogprobTerms]:
    """Return the terms of each row from the results of a `logprobs` entry (abi.py)."""
    masses, ranks = terms[TermField.MASS].tolist(), terms[TermField.RANK].tolist()
    logits = terms[TermField.LOGIT].astype(np.int32).view(np.float32).tolist()
    return list(map(LogprobTerms, masses, logits, ranks, top_values.tolist(), top_indices.tolist()))
