"""Adjustments: the first step of sampling, which changes logits before the filters.

To add an adjustment: add a field to SamplingParams, a subclass of Adjustment, and an item in `adjustments`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np

from shortfin_apps.llm.components.request.grammar import Bitmask
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.sampling.candidates import Candidates, Floats, Ints, ranked
from shortfin_apps.llm.components.sampling.row_edits import RowEdits, bitmask_of
from shortfin_apps.llm.contract.abi import PenaltyField
from shortfin_apps.llm.contract.errors import ConstraintError

WHOLE_ROW = math.inf


class Adjustment(ABC):
    """A change to the logits of one row. `param` is the request field that enables the adjustment.

    If a row has no `logits`, only its candidates are changed.
    """

    param: ClassVar[str]
    # Whether a token with a finite logit keeps one. If so, a token that a grammar forces is chosen anyway.
    keeps_all: ClassVar[bool] = False

    @abstractmethod
    def num_lost(self, params: SamplingParams, num_generated: int) -> float:
        """Return the maximum number of candidates that the adjustment removes; 0 if it is off.

        Callers must not call `apply` of an adjustment that is off. WHOLE_ROW means that the adjustment may
        remove any number, or reorder tokens: then candidates suffice only in some steps (`decided.py`), and a
        VMFB that returns no logits cannot serve the request.
        """

    def raises_any(self, params: SamplingParams) -> bool:
        """Return whether the adjustment may raise a logit, so that a non-candidate may become the best token.

        If so, `apply` needs a row with `logits`.
        """
        return False

    def needs_output(self, params: SamplingParams) -> bool:
        """Return whether `edit` depends on which tokens were generated before, not only on how many."""
        return False

    @abstractmethod
    def apply(self, row: Candidates, request: Request) -> Candidates:
        """Return the changed row in new arrays.

        Candidates are sorted, best first. A row with `logits` may be returned without candidates.
        """

    @abstractmethod
    def edit(self, edits: RowEdits, request: Request) -> bool:
        """Add the change to the edits that the device applies, with the same bits as `apply` on the host.

        Edits have penalties, but not the counts that these depend on. Returns False if the device cannot make
        the change; the host must then call `apply`. Raises what `apply` raises.
        """


class MinTokens(Adjustment):
    """Bans end-of-sequence and stop tokens until `min_tokens` tokens have been generated."""

    param = "min_tokens"

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def num_lost(self, params: SamplingParams, num_generated: int) -> int:
        return len(self._banned(params)) if num_generated < params.min_tokens else 0

    def apply(self, row: Candidates, request: Request) -> Candidates:
        return _without(row, list(self._banned(request.call.params)))

    def edit(self, edits: RowEdits, request: Request) -> bool:
        edits.ban(self._banned(request.call.params))
        return True

    def _banned(self, params: SamplingParams) -> frozenset[int]:
        return params.stop_token_ids | self._eos_token_ids


class AllowedTokens(Adjustment):
    """Bans every token that is not among the `allowed_token_ids`."""

    param = "allowed_token_ids"

    def num_lost(self, params: SamplingParams, num_generated: int) -> float:
        return 0 if params.allowed_token_ids is None else WHOLE_ROW

    def apply(self, row: Candidates, request: Request) -> Candidates:
        token_ids = request.call.params.allowed_token_ids or frozenset()
        if row.logits is None:
            return row.only(np.array([token_id in token_ids for token_id in row.token_ids.tolist()], bool))
        allowed = _array_of(token_ids)
        allowed = allowed[allowed < len(row.logits)]
        logits = row.logits.astype(np.float32)
        only = np.full_like(logits, -np.inf)
        only[allowed] = logits[allowed]
        return whole_row(only)

    def edit(self, edits: RowEdits, request: Request) -> bool:
        edits.allow(bitmask_of(request.call.params.allowed_token_ids or frozenset()))
        return True


class BadWords(Adjustment):
    """Bans the last token of each bad word if the output ends with the word's other tokens."""

    param = "bad_words"

    def num_lost(self, params: SamplingParams, num_generated: int) -> int:
        return len({word[-1] for word in params.bad_words})

    def needs_output(self, params: SamplingParams) -> bool:
        return any(len(word) > 1 for word in params.bad_words)

    def apply(self, row: Candidates, request: Request) -> Candidates:
        return _without(row, self._banned(request))

    def edit(self, edits: RowEdits, request: Request) -> bool:
        edits.ban(self._banned(request))
        return True

    @staticmethod
    def _banned(request: Request) -> list[int]:
        words = request.call.params.bad_words
        return [word[-1] for word in words if _has_generated(request, word[:-1])]


class LogitBias(Adjustment):
    """Adds the request's `logit_bias` to the logits of the tokens that it names."""

    param = "logit_bias"
    keeps_all = True

    def num_lost(self, params: SamplingParams, num_generated: int) -> float:
        return WHOLE_ROW if params.logit_bias else 0

    def raises_any(self, params: SamplingParams) -> bool:
        return any(bias > 0 for _, bias in params.logit_bias)

    def apply(self, row: Candidates, request: Request) -> Candidates:
        token_ids, biases, places = _biases_of(request.call.params.logit_bias)
        return _changed(row, token_ids, places, lambda logits, at: logits + biases[at])

    def edit(self, edits: RowEdits, request: Request) -> bool:
        token_ids, biases, _ = _biases_of(request.call.params.logit_bias)
        edits.bias(token_ids, biases.tolist())
        return True


class Penalty(Adjustment):
    """A change to the logits of tokens in the prompt or output. `field` is the ABI's name of `param`."""

    keeps_all = True
    field: ClassVar[PenaltyField]

    def apply(self, row: Candidates, request: Request) -> Candidates:
        seen, params = request.token_counts, request.call.params
        seen.catch_up(request.token_ids)

        def penalised(logits: Floats, at: Ints) -> Floats:
            return self._penalised(logits, np.array(seen.counts, np.int64)[at], params)

        return _changed(row, seen.token_ids, seen.places, penalised)

    def edit(self, edits: RowEdits, request: Request) -> bool:
        edits.penalise(self.field, getattr(request.call.params, self.param))
        return True

    @abstractmethod
    def _penalised(self, logits: Floats, counts: Ints, params: SamplingParams) -> Floats:
        """Return the new f32 logits of tokens in prompt or output; `counts`: how often each was generated."""


class RepetitionPenalty(Penalty):
    """Makes tokens of prompt and output less likely, by a factor (arXiv:1909.05858).

    Divides positive logits of these tokens by `repetition_penalty`, and multiplies their other logits.
    """

    param = "repetition_penalty"
    field = PenaltyField.REPETITION

    def num_lost(self, params: SamplingParams, num_generated: int) -> float:
        return 0 if params.repetition_penalty == 1 else WHOLE_ROW

    def raises_any(self, params: SamplingParams) -> bool:
        return params.repetition_penalty < 1

    def _penalised(self, logits: Floats, counts: Ints, params: SamplingParams) -> Floats:
        penalty = np.float32(params.repetition_penalty)
        return np.where(logits > 0, logits / penalty, logits * penalty)


class FrequencyPenalty(Penalty):
    """Subtracts the `frequency_penalty` once for each time that a token was generated."""

    param = "frequency_penalty"
    field = PenaltyField.FREQUENCY

    def num_lost(self, params: SamplingParams, num_generated: int) -> float:
        return WHOLE_ROW if params.frequency_penalty else 0

    def raises_any(self, params: SamplingParams) -> bool:
        return params.frequency_penalty < 0

    def _penalised(self, logits: Floats, counts: Ints, params: SamplingParams) -> Floats:
        return logits - np.float32(params.frequency_penalty) * counts.astype(np.float32)


class PresencePenalty(Penalty):
    """Subtracts the `presence_penalty` from every token that was generated."""

    param = "presence_penalty"
    field = PenaltyField.PRESENCE

    def num_lost(self, params: SamplingParams, num_generated: int) -> float:
        return WHOLE_ROW if params.presence_penalty else 0

    def raises_any(self, params: SamplingParams) -> bool:
        return params.presence_penalty < 0

    def _penalised(self, logits: Floats, counts: Ints, params: SamplingParams) -> Floats:
        return logits - np.float32(params.presence_penalty) * (counts > 0)


class OutputGrammar(Adjustment):
    """Bans every token that the request's grammar does not allow next; a forced token is allowed."""

    param = "structured_outputs"
    keeps_all = True

    def num_lost(self, params: SamplingParams, num_generated: int) -> float:
        return 0 if params.output_grammar is None else WHOLE_ROW

    def needs_output(self, params: SamplingParams) -> bool:
        return True

    def apply(self, row: Candidates, request: Request) -> Candidates:
        """Raises ConstraintError if every token is banned."""
        bitmask = allowed_next(request)
        if row.logits is None:
            return within_bitmask(row, bitmask)
        bits = np.frombuffer(bitmask, np.uint8)
        allowed = np.unpackbits(bits, count=len(row.logits), bitorder="little").view(bool)
        logits = np.where(allowed, row.logits, row.logits.dtype.type(-np.inf))
        if logits.max() == -np.inf:
            raise ConstraintError("no token is left that the grammar and the other parameters allow")
        return Candidates(row.values[:0], row.token_ids[:0], logits)

    def edit(self, edits: RowEdits, request: Request) -> bool:
        edits.allow(allowed_next(request))
        return True


class ForcedTokens(Adjustment):
    """Makes the next of the `forced_token_ids` the only candidate."""

    param = "prompt_logprobs"

    def num_lost(self, params: SamplingParams, num_generated: int) -> float:
        return WHOLE_ROW if num_generated < len(params.forced_token_ids) else 0

    def needs_output(self, params: SamplingParams) -> bool:
        return True

    def apply(self, row: Candidates, request: Request) -> Candidates:
        token_id = request.call.params.forced_token_ids[request.num_generated]
        return Candidates(np.zeros(1, np.float32), np.array([token_id]), None)

    def edit(self, edits: RowEdits, request: Request) -> bool:
        return False


def adjustments(eos_token_ids: frozenset[int]) -> tuple[Adjustment, ...]:
    """Return all adjustments in order of application, as in vLLM: bans and biases before penalties."""
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


def whole_row(logits: Floats) -> Candidates:
    """Return a row with `logits` [V] and no candidates."""
    return Candidates(np.empty(0, logits.dtype), np.empty(0, np.int64), logits)


def allowed_next(request: Request, ahead: Sequence[int] = ()) -> Bitmask:
    """Return the bitmask of tokens that the request's grammar allows after the proposed tokens `ahead`.

    Raises ConstraintError when the grammar fails.
    """
    assert request.matcher is not None, "made with the request"
    if ahead:
        request.next_mask.num_generated = -1
        return request.matcher.allowed(request.output, ahead)
    mask = request.next_mask
    if mask.num_generated != len(request.output):
        mask.bitmask, mask.num_generated = request.matcher.allowed(request.output), len(request.output)
    return mask.bitmask


def within_bitmask(row: Candidates, bitmask: Bitmask) -> Candidates:
    """Return the row's candidates with a 1 in `bitmask`."""
    octets, bits = np.divmod(row.token_ids, 8)
    known = np.frombuffer(bitmask, np.uint8)
    return row.only((known.take(octets, mode="clip") >> bits & 1 == 1) & (octets < len(known)))


@lru_cache(maxsize=256)
def _array_of(token_ids: frozenset[int]) -> Ints:
    """Convert a set to an array. Cache lookups are fast: a request passes the same object in every step."""
    return np.fromiter(token_ids, np.int64)


@lru_cache(maxsize=256)
def _biases_of(pairs: tuple[tuple[int, float], ...]) -> tuple[list[int], Floats, dict[int, int]]:
    """Return the distinct tokens of a `logit_bias`, their f32 biases, and a map from token to index.

    The biases of a token that occurs several times are added.
    """
    sums: dict[int, float] = {}
    for token_id, bias in pairs:
        sums[token_id] = sums.get(token_id, 0.0) + bias
    places = {token_id: place for place, token_id in enumerate(sums)}
    return list(sums), np.array(list(sums.values()), np.float32), places


def _changed(
    row: Candidates,
    token_ids: Sequence[int],
    places: Mapping[int, int],
    change: Callable[[Floats, Ints], Floats],
) -> Candidates:
    """Return the row in f32 with changed logits of the `token_ids` that the row contains.

    `change` computes new logits from old logits and the tokens' indices in `token_ids`; `places` maps tokens
    to these indices. Callers must pass distinct `token_ids`.
    """
    if row.logits is None:
        found = np.array([places.get(token_id, -1) for token_id in row.token_ids.tolist()], np.int64)
        among, at = np.flatnonzero(found >= 0), found[found >= 0]
        values = row.values.astype(np.float32)
        values[among] = change(values[among], at)
        return ranked(values, row.token_ids)
    logits, everywhere = row.logits.astype(np.float32), np.array(token_ids, np.int64)
    at = np.flatnonzero(everywhere < len(logits))  # a tokenizer may know tokens that the model does not
    among = everywhere[at]
    logits[among] = change(logits[among], at)
    return whole_row(logits)


def _without(row: Candidates, banned: Sequence[int]) -> Candidates:
    """Remove the `banned` tokens from the row's candidates, and set their logits to minus infinity."""
    left = row.only(~np.isin(row.token_ids, banned))
    if row.logits is None:
        return left
    logits = row.logits.copy()
    logits[[token_id for token_id in banned if token_id < len(logits)]] = -np.inf
    return Candidates(left.values, left.token_ids, logits)


def _has_generated(request: Request, tokens: tuple[int, ...]) -> bool:
    """Return whether the output ends with `tokens`."""
    count = len(tokens)
    return (
        count <= request.num_generated
        and tuple(request.token_ids[len(request.token_ids) - count :]) == tokens
    )
