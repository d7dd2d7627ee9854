"""Compares an entry's result for one position of a test prompt with the expected result."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.sampling.candidates import LogprobTerms
from shortfin_apps.llm.components.sampling.logprobs import terms_of
from shortfin_apps.llm.contract.abi import NO_LOGIT
from shortfin_apps.llm.contract.self_test_file import ExpectedLogits, SelfTestFile

Array = npt.NDArray[Any]

# A clear difference of two logits, in units of the file's tolerance. No token may be clearly better than the
# tokens that the reference ranks above it.
CLEAR = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """The result of one row of one invocation: logits at a position of a prompt, or a token drawn from them.

    `error` is the error measure of SelfTestFile; `problem` describes any other fault, None if there is none.
    `bits` is a digest of the logits, the drawn token, or its terms. `row` distinguishes an entry's results.
    """

    entry: str
    row: int
    prompt: int
    position: int
    error: float = 0.0
    problem: str | None = None
    bits: bytes = b""
    is_drawn: bool = False
    is_draft: bool = False  # by a draft layer, which predicts another token

    @property
    def place(self) -> tuple[bool, int, int]:
        """The key of a row: all entries compute rows with the same key with the same bits."""
        return self.is_draft, self.prompt, self.position

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Key of the same row in another run of the self-test."""
        return self.entry, self.row, self.prompt, self.position

    def passes(self, tolerance: float) -> bool:
        return self.problem is None and self.error <= tolerance


def compare_row(
    entry: str,
    row: int,
    prompt: int,
    expected: ExpectedLogits,
    file: SelfTestFile,
    logits: Array,
    values: Array,
    indices: Array,
) -> Computed:
    """Compare `logits` [V] and their candidates, `values` and `indices` [K], with the reference's logits."""
    finite = bool(np.isfinite(logits).all())
    problem: str | None = "its logits are not finite"
    if finite:
        problem = _problem_of(logits, values, indices) or _unexpected(logits, expected, file)
    return Computed(
        entry=entry,
        row=row,
        prompt=prompt,
        position=expected.position,
        error=_error(logits, expected, file) if finite else float("inf"),
        problem=problem,
        bits=_digest(logits),
    )


def with_draw(computed: Computed, logits: Array, token_id: int, problem: str | None) -> Computed:
    """Return `computed` with the problem of a greedy draw from its logits, or `problem`, if it has none."""
    return replace(computed, problem=computed.problem or _draw_problem(logits, token_id) or problem)


def drawn_as_seen(entry: str, row: int, prompt: int, position: int, logits: Array, token_id: int) -> Computed:
    """Check that a token drawn greedily from `logits` is the best one, or in a tie the lowest ID."""
    return Computed(
        entry=entry,
        row=row,
        prompt=prompt,
        position=position,
        problem=_draw_problem(logits, token_id),
        bits=token_id.to_bytes(8, "little", signed=True),
        is_drawn=True,
    )


def logprobs_as_seen(
    entry: str, row: int, prompt: int, position: int, logits: Array, token_id: int, terms: LogprobTerms
) -> Computed:
    """Check that `terms` of `logits` with the token `token_id` are those that the host computes."""
    found = _bits_of(terms)
    problem: str | None = "its logits are not finite"
    if np.isfinite(logits).all():
        is_equal = found == _bits_of(terms_of(logits, token_id, len(terms.token_ids)))
        problem = None if is_equal else f"its terms of token {token_id} are not those of its logits"
    return Computed(
        entry=entry,
        row=row,
        prompt=prompt,
        position=position,
        problem=problem,
        bits=found,
        is_drawn=True,
    )


def _bits_of(terms: LogprobTerms) -> bytes:
    return repr(tuple(terms)).encode()


def _draw_problem(logits: Array, token_id: int) -> str | None:
    best = int(np.argmax(logits))
    return None if token_id == best else f"it draws token {token_id} of logits whose best is {best}"


def _problem_of(logits: Array, values: Array, indices: Array) -> str | None:
    """Return what is wrong with the candidates, or None if they are exactly the best `logits`, best first."""
    if not (indices.min() >= 0 and indices.max() < len(logits)) or len(np.unique(indices)) < len(indices):
        return "its candidates are no distinct tokens of the vocabulary"
    if not np.array_equal(logits[indices], values):
        return "its candidates' values are not their logits"
    if (np.diff(values) > 0).any() or np.count_nonzero(logits > values[-1]) >= len(values):
        return "its candidates are not the best of its logits"
    return None


def _unexpected(logits: Array, expected: ExpectedLogits, file: SelfTestFile) -> str | None:
    """Return a problem if a token that is not among the reference's best has a clearly better logit.

    Compares with the lowest of the reference's best logits. Returns None if no such token exists.
    """
    others = logits.copy()
    others[list(expected.best_ids)] = -np.inf
    token_id = int(np.argmax(others))
    if others[token_id] <= expected.best[-1] + _clear(expected, file):
        return None
    return f"token {token_id} is among the best, where token {expected.best_ids[-1]} is better"


def _clear(expected: ExpectedLogits, file: SelfTestFile) -> float:
    return CLEAR * file.tolerance * _deviation(expected)


def _deviation(expected: ExpectedLogits) -> float:
    known = [each for each in expected.sampled if each != NO_LOGIT] or [0.0]
    return float(np.std(known)) or 1.0


def _error(logits: Array, expected: ExpectedLogits, file: SelfTestFile) -> float:
    """Return the larger of the errors at the file's sampled tokens and at the reference's best tokens."""
    pairs = ((file.sample_ids, expected.sampled), (expected.best_ids, expected.best))
    differences = [logits[list(ids)].astype(np.float64) - np.asarray(known) for ids, known in pairs]
    return max(float(np.sqrt(np.mean(each * each))) for each in differences) / _deviation(expected)


def _digest(logits: Array) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(logits).view(np.uint8).data, digest_size=16).digest()
