"""Adjustments: the first step of sampling, which changes the logits of some tokens before the filters.

To add one: its field in SamplingParams, a class here, and its place in `adjustments`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.sampling.candidates import Candidates, Floats, Ints
from shortfin_apps.llm.errors import InvocationError

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
        return _without(row, list(self._banned(request.call.params)))

    def _banned(self, params: SamplingParams) -> frozenset[int]:
        return params.stop_token_ids | self._eos_token_ids


class AllowedTokens(Adjustment):
    """Bans every token that is not among the `allowed_token_ids`."""

    param = "allowed_token_ids"

    def num_lost(self, params: SamplingParams, num_generated: int) -> float:
        return 0 if params.allowed_token_ids is None else WHOLE_ROW

    def apply(self, row: Candidates, request: Request) -> Candidates:
        allowed = _within(_array_of(request.call.params.allowed_token_ids or frozenset()), row)
        logits = _logits_of(row)
        only = np.full_like(logits, -np.inf)
        only[allowed] = logits[allowed]
        return whole_row(only)


class BadWords(Adjustment):
    """Bans the last token of each of the `bad_words` whose other tokens were just generated."""

    param = "bad_words"

    def num_lost(self, params: SamplingParams, num_generated: int) -> int:
        return len({word[-1] for word in params.bad_words})

    def apply(self, row: Candidates, request: Request) -> Candidates:
        words = request.call.params.bad_words
        return _without(row, [word[-1] for word in words if _has_generated(request, word[:-1])])


class LogitBias(Adjustment):
    """Adds the `logit_bias` of each token that has one."""

    param = "logit_bias"

    def num_lost(self, params: SamplingParams, num_generated: int) -> float:
        return WHOLE_ROW if params.logit_bias else 0

    def apply(self, row: Candidates, request: Request) -> Candidates:
        logits = _logits_of(row)
        for token_id, bias in request.call.params.logit_bias:
            if token_id < len(logits):
                logits[token_id] += np.float32(bias)
        return whole_row(logits)


class RepetitionPenalty(Adjustment):
    """Makes tokens of prompt and output less likely, by a factor (arXiv:1909.05858)."""

    param = "repetition_penalty"

    def num_lost(self, params: SamplingParams, num_generated: int) -> float:
        return 0 if params.repetition_penalty == 1 else WHOLE_ROW

    def apply(self, row: Candidates, request: Request) -> Candidates:
        logits, penalty = _logits_of(row), np.float32(request.call.params.repetition_penalty)
        seen = _within(_seen(request)[0], row)
        known = logits[seen]
        logits[seen] = np.where(known > 0, known / penalty, known * penalty)
        return whole_row(logits)


class FrequencyPenalty(Adjustment):
    """Subtracts the `frequency_penalty` for each time that a token was generated."""

    param = "frequency_penalty"

    def num_lost(self, params: SamplingParams, num_generated: int) -> float:
        return WHOLE_ROW if params.frequency_penalty else 0

    def apply(self, row: Candidates, request: Request) -> Candidates:
        penalty = np.float32(request.call.params.frequency_penalty)
        return _subtracted(row, request, lambda counts: penalty * counts.astype(np.float32))


class PresencePenalty(Adjustment):
    """Subtracts the `presence_penalty` from every token that was generated."""

    param = "presence_penalty"

    def num_lost(self, params: SamplingParams, num_generated: int) -> float:
        return WHOLE_ROW if params.presence_penalty else 0

    def apply(self, row: Candidates, request: Request) -> Candidates:
        penalty = np.float32(request.call.params.presence_penalty)
        return _subtracted(row, request, lambda counts: penalty * (counts > 0))


class OutputGrammar(Adjustment):
    """Leaves the tokens that the request's grammar allows next."""

    param = "structured_outputs"

    def num_lost(self, params: SamplingParams, num_generated: int) -> float:
        return 0 if params.output_grammar is None else WHOLE_ROW

    def apply(self, row: Candidates, request: Request) -> Candidates:
        """Raises InvocationError when no token is left."""
        bitmask = _allowed_next(request)
        if request.call.params.greedy and (best := _first_allowed(row, bitmask)) is not None:
            return best
        assert row.logits is not None, "a row with a grammar is whole, if its candidates do not decide"
        bits = np.frombuffer(bitmask, np.uint8)
        allowed = np.unpackbits(bits, count=len(row.logits), bitorder="little").view(bool)
        logits = np.where(allowed, row.logits, row.logits.dtype.type(-np.inf))
        if logits.max() == -np.inf:
            raise InvocationError("no token is left that the grammar and the other parameters allow")
        return Candidates(row.values[:0], row.token_ids[:0], logits)


class ForcedTokens(Adjustment):
    """Leaves nothing but the next of the `forced_token_ids`."""

    param = "prompt_logprobs"

    def num_lost(self, params: SamplingParams, num_generated: int) -> float:
        return WHOLE_ROW if num_generated < len(params.forced_token_ids) else 0

    def apply(self, row: Candidates, request: Request) -> Candidates:
        token_id = request.call.params.forced_token_ids[request.num_generated]
        return Candidates(np.zeros(1, np.float32), np.array([token_id]), None)


def adjustments(eos_token_ids: frozenset[int]) -> tuple[Adjustment, ...]:
    """Every adjustment, in the order in which they are applied: vLLM's, bans and biases before penalties."""
    return (
        AllowedTokens(),
        BadWords(),
        MinTokens(eos_token_ids),
        LogitBias(),
        RepetitionPenalty(),
        FrequencyPenalty(),
        PresencePenalty(),
        OutputGrammar(),
        ForcedTokens(),
    )


def decided_by_candidates(row: Candidates, request: Request) -> bool:
    """Whether the request is greedy, and its grammar leaves one of the row's candidates, the next token then.

    False if the grammar fails: `apply` then says so, to this request alone.
    """
    try:
        return request.call.params.greedy and _first_allowed(row, _allowed_next(request)) is not None
    except InvocationError:
        return False


def whole_row(logits: Floats) -> Candidates:
    """A row of which all `logits` [V] are known, and no candidates."""
    return Candidates(np.empty(0, logits.dtype), np.empty(0, np.int64), logits)


def _allowed_next(request: Request) -> bytes:
    """The bitmask of the tokens that the request's grammar allows next."""
    assert request.matcher is not None, "made with the request"
    return request.matcher.allowed(request.token_ids[len(request.call.prompt_token_ids) :])


def _first_allowed(row: Candidates, bitmask: bytes) -> Candidates | None:
    """The best of the row's candidates that is allowed, alone; None if none is."""
    for place, token_id in enumerate(row.token_ids.tolist()):
        byte, bit = divmod(token_id, 8)
        if byte < len(bitmask) and bitmask[byte] >> bit & 1 and row.values[place] > -np.inf:
            return Candidates(row.values[place : place + 1], row.token_ids[place : place + 1], None)
    return None


def _logits_of(row: Candidates) -> npt.NDArray[np.float32]:
    """A copy of the row's logits [V], in the type in which penalties are computed."""
    assert row.logits is not None, "a request that needs logits was admitted to a VMFB without them"
    return row.logits.astype(np.float32)


@lru_cache(maxsize=256)
def _array_of(token_ids: frozenset[int]) -> Ints:
    """Cached by identity, in effect: a request asks with the same set in each of its steps."""
    return np.fromiter(token_ids, np.int64)


def _seen(request: Request) -> tuple[Ints, Ints]:
    """The distinct tokens of prompt and output, and how often each was generated."""
    counts = request.token_counts
    counts.catch_up(request.token_ids)
    return np.array(counts.token_ids, np.int64), np.array(counts.counts, np.int64)


def _within(token_ids: Ints, row: Candidates) -> Ints:
    """Those that have a logit: a tokenizer may know tokens that the model does not."""
    assert row.logits is not None
    return token_ids[token_ids < len(row.logits)]


def _without(row: Candidates, banned: Sequence[int]) -> Candidates:
    """The row in which the `banned` tokens cannot be chosen."""
    allowed = ~np.isin(row.token_ids, banned)
    logits = row.logits
    if logits is not None:
        logits = logits.copy()
        logits[[token_id for token_id in banned if token_id < len(logits)]] = -np.inf
    return Candidates(row.values[allowed], row.token_ids[allowed], logits)


def _has_generated(request: Request, tokens: tuple[int, ...]) -> bool:
    """Whether the output ends with these tokens."""
    count = len(tokens)
    return (
        count <= request.num_generated
        and tuple(request.token_ids[len(request.token_ids) - count :]) == tokens
    )


def _subtracted(row: Candidates, request: Request, penalties: Callable[[Ints], Floats]) -> Candidates:
    """The row less the penalties of the tokens seen, computed from how often each was generated."""
    logits = _logits_of(row)
    seen, counts = _seen(request)
    known = seen < len(logits)
    logits[seen[known]] -= penalties(counts[known])
    return whole_row(logits)
