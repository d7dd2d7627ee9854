"""Sampler: chooses the next token of a row in three steps: adjustments, filters, draw.

The device returns the row's best K logits (the candidates). Greedy and top-k sampling with k <= K need no
more. Everything that depends on the full distribution (sampling without top-k, log-probabilities, some
adjustments) needs all logits of the row, unless the device itself can draw the token from these, and compute
what log-probabilities need.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress

from shortfin_apps.llm.components.request.request import Chooser, Request
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.sampling.adjustments import (
    WHOLE_ROW,
    Adjustment,
    adjustments,
    allowed_next,
)
from shortfin_apps.llm.components.sampling.candidates import Candidates, Drawn
from shortfin_apps.llm.components.sampling.decided import deciding_candidates
from shortfin_apps.llm.components.sampling.device_sampling import device_fields
from shortfin_apps.llm.components.sampling.draw import NOT_FINITE, draw
from shortfin_apps.llm.components.sampling.filters import has_host_filters, kept
from shortfin_apps.llm.components.sampling.row_edits import RowEdits
from shortfin_apps.llm.components.sampling.whole_row import draw_from_row
from shortfin_apps.llm.contract.errors import ConstraintError, InvalidRequestError, InvocationError

MAX_FORCED_TOKENS = 32  # appended at once: bounds the work of a commit, and the deltas of a step
NO_TOKEN_LEFT = "no token is left that the request's `bad_words` and other bans allow"


class Sampler:
    """A stateless sampler. `num_candidates` is the K of the VMFB's top-k, 0 if the VMFB returns only logits.

    `draws_rows`: the device can draw tokens from full rows. `adjusts_rows`: it can also adjust the rows
    first. `computes_logprobs`: it can compute the terms of log-probabilities.
    """

    def __init__(
        self,
        eos_token_ids: frozenset[int],
        *,
        num_candidates: int = 0,
        returns_logits: bool = True,
        draws_rows: bool = False,
        adjusts_rows: bool = False,
        computes_logprobs: bool = False,
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._adjustments = adjustments(eos_token_ids)
        self._num_candidates = num_candidates
        self._returns_logits = returns_logits
        self._draws_rows = draws_rows
        self._adjusts_rows = draws_rows and adjusts_rows
        self._computes_logprobs = computes_logprobs

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequestError if all tokens may become banned, or if the VMFB lacks needed logits."""
        self._check_bans(params)
        if self._returns_logits:
            return
        refused, num_lost = [], 0.0
        for adjustment in self._adjustments:
            num_lost += adjustment.num_lost(params, 0)
            if num_lost >= self._num_candidates:
                refused.append(adjustment.param)
        if params.logprobs is not None:
            refused.append("logprobs")
        if refused:
            raise InvalidRequestError(
                f"this model was compiled without logits, so no `{refused[0]}`", refused[0]
            )

    def _check_bans(self, params: SamplingParams) -> None:
        """Raise InvalidRequestError unless some allowed token can never be banned."""
        if params.allowed_token_ids is None:
            return
        banned = {word[-1] for word in params.bad_words}
        if params.min_tokens:
            banned |= params.stop_token_ids | self._eos_token_ids
        if params.allowed_token_ids <= banned:  # without a copy of what may be a whole vocabulary
            raise InvalidRequestError(
                "`allowed_token_ids`: `bad_words` and `min_tokens` may ban all of them", "allowed_token_ids"
            )

    def needs_logits(self, request: Request, num_ahead: int = 0) -> bool:
        """Return whether the host needs all logits of the row, to choose the next token or for logprobs.

        Even if True, `decided` may be able to choose the token from the candidates. False if the VMFB returns
        no logits, or if the device draws the token. `num_ahead` proposed tokens come before the token.
        """
        has_logprobs = request.call.params.logprobs is not None
        return self._returns_logits and (has_logprobs or self._is_left_to_host(request, num_ahead))

    def decided(self, row: Candidates, request: Request, ahead: Sequence[int] = ()) -> Drawn | None:
        """Return the next token if the candidates of `row` suffice to choose it, else None.

        For rows for which `needs_logits` is True, but without fetched logits. The result is the token
        that `sample` would choose from the full row, after the proposed tokens `ahead`.
        """
        params = request.call.params
        if params.logprobs is not None or not row.is_finite:
            return None
        index = request.num_generated + len(ahead)
        try:
            left = deciding_candidates(row, request, self._active(request, index), ahead)
        except ConstraintError:  # `sample` raises it again, for this request only
            return None
        return None if left is None else Drawn(_chosen(left, request, index))

    def is_drawn_from_row(self, request: Request, num_ahead: int = 0) -> bool:
        """Return whether the device draws the token after `num_ahead` proposals from a full row.

        The row is in the results that another entry has left on the device.
        """
        return request.call.params.logprobs is None and self._draws_whole_row(request, num_ahead)

    def prepare(self, request: Request) -> RowEdits | None:
        """Precompute, before the row has arrived, which tokens the request's grammar allows next.

        Also returns the row's edits as `row_edits` does; None if the request is greedy or has a top-k,
        because the candidates may then suffice, or if it has logprobs, because the host reads the row.
        """
        params = request.call.params
        if params.output_grammar is not None:
            with suppress(ConstraintError):  # `sample` raises it again
                allowed_next(request)
        if params.greedy or params.top_k or params.logprobs is not None:
            return None
        return self.row_edits(request)

    def row_edits(self, request: Request, num_drawing: int = 0) -> RowEdits | None:
        """Return the adjustments of the next row if the device can apply them and draw the token, else None.

        The device then draws the token that `sample` would choose. None also if there are no adjustments. If
        `num_drawing` tokens that the host does not know come before that token, callers must pass a request
        with the chooser ADJUSTED.
        """
        if request.chooser is not Chooser.LATE and not self._can_adjust(request.call.params):
            return None
        edits, active = RowEdits(), self._active(request, request.num_generated + num_drawing)
        try:
            for each in active:
                if not each.edit(edits, request):
                    return None
            return edits if active else None
        except ConstraintError:  # `sample` raises it again, for this request only
            return None

    def forced(self, request: Request) -> Sequence[int]:
        """Return the next tokens, at most MAX_FORCED_TOKENS, if the request's grammar forces them.

        They are the tokens that `sample` would choose, whatever the rows and the seed. Empty if the request
        needs the rows (log-probabilities, receipts), or if another adjustment may ban or replace a token.
        """
        params = request.call.params
        if request.matcher is None or params.logprobs is not None or params.chosen_logits:
            return ()
        active = self._active(request, request.num_generated)
        if len(active) > 1 and not all(each.keeps_all for each in active):
            return ()
        return request.matcher.forced(request.output)[:MAX_FORCED_TOKENS]

    def chooser(self, request: Request, num_ahead: int = 0) -> Chooser:
        """Return what can choose the token after `num_ahead` more tokens; `sample` returns this token."""
        params = request.call.params
        if not self._num_candidates or (request.needs_terms and not self._can_compute_terms(params)):
            return Chooser.HOST
        if self._is_plain(request, num_ahead):
            is_left = self._returns_logits and self._is_left_to_host(request, num_ahead)
            return Chooser.HOST if is_left else Chooser.DEVICE
        if not self._can_adjust(params):
            return Chooser.HOST
        active = self._active(request, request.num_generated + num_ahead)
        if any(each.needs_output(params) for each in active):
            return Chooser.LATE
        edits = self.row_edits(request, num_ahead)
        return Chooser.HOST if edits is None or edits.may_ban_all() else Chooser.ADJUSTED

    def device_fields(self, request: Request) -> array[int]:
        """Return the request's sampling parameters as a column of an entry's `sampling` argument."""
        return device_fields(request, self._num_candidates, draws_rows=self._draws_rows)

    def sample(self, row: Candidates | Drawn, request: Request) -> int:
        """Return the ID of the next token.

        Raises:
            InvocationError: The logits are not finite.
            ConstraintError: The request's grammar, bans and other constraints allow no token.
        """
        if isinstance(row, Drawn):
            return row.token_id
        computed = row
        for adjustment in self._active(request, request.num_generated):
            row = adjustment.apply(row, request)
        if not row.is_finite:
            raise ConstraintError(NO_TOKEN_LEFT) if computed.is_finite else InvocationError(NOT_FINITE)
        return _chosen(row, request, request.num_generated)

    def _can_adjust(self, params: SamplingParams) -> bool:
        """Return whether the device can draw from adjusted rows as these parameters ask for."""
        is_known = params.top_k <= self._num_candidates
        return self._adjusts_rows and is_known and not has_host_filters(params)

    def _can_compute_terms(self, params: SamplingParams) -> bool:
        """Return whether the device computes all that the host reports of a row, besides the token."""
        return self._computes_logprobs and (params.logprobs or 0) <= self._num_candidates

    def _is_left_to_host(self, request: Request, num_ahead: int) -> bool:
        """Return whether the candidates may not suffice, and the device cannot draw from the full row."""
        is_short = self._num_needed(request, num_ahead) > self._num_candidates
        return is_short and not self._draws_whole_row(request, num_ahead)

    def _draws_whole_row(self, request: Request, num_ahead: int) -> bool:
        """Return whether the device can draw the token from a full row, and does not take the candidates."""
        params = request.call.params
        is_whole = not params.greedy and not params.top_k
        return self._draws_rows and is_whole and self._is_plain(request, num_ahead)

    def _active(self, request: Request, num_generated: int) -> Sequence[Adjustment]:
        """Return the adjustments of the row after `num_generated` tokens of output."""
        if request.adjustments is not None:
            return request.adjustments
        params = request.call.params
        active = [each for each in self._adjustments if each.num_lost(params, num_generated)]
        if request.num_generated >= max(params.min_tokens, len(params.forced_token_ids)):
            request.adjustments = active  # only these two depend on the output's length
        return active

    def _is_plain(self, request: Request, num_ahead: int = 0) -> bool:
        """Return whether the token needs no adjustment and only filters that devices implement."""
        params, num_generated = request.call.params, request.num_generated + num_ahead
        adjusted = any(each.num_lost(params, num_generated) for each in self._adjustments)
        return not adjusted and not has_host_filters(params)

    def _num_needed(self, request: Request, num_ahead: int) -> float:
        """Return how many of the row's best logits always suffice to choose the token."""
        params, num_generated = request.call.params, request.num_generated + num_ahead
        num_kept = 1 if params.greedy else params.top_k or WHOLE_ROW
        return num_kept + sum(a.num_lost(params, num_generated) for a in self._adjustments)


def _chosen(row: Candidates, request: Request, index: int) -> int:
    """Choose output token `index` from an adjusted row. Callers must have checked that the row is finite."""
    params = request.call.params
    if params.greedy or (row.logits is None and len(row.token_ids) == 1):
        return row.best_token_id
    if row.logits is not None and not params.top_k:
        return draw_from_row(row.logits, row.best, params, request.seed, index)
    token_ids, weights = kept(row, row.best, params)
    return int(token_ids[draw(weights, request.seed, index)])
