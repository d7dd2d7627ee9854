"""Beam search, built on top of the engine from ordinary requests.

Each step requests one more token for every live beam, with the log-probabilities of the best alternatives,
and keeps the continuations with the best scores. A beam holds pages only during a step. The prefix cache
keeps the pages between steps: with `--prefix-cache trie`, a step computes only the tokens of each beam's
last, partial page. With `none`, a step recomputes the full beam, with the same result.

The score of a hypothesis is the sum of its tokens' log-probabilities under the model's own distribution,
without temperature or filters and, as upstream, without a length penalty.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shortfin_apps.llm.components.request.messages import (
    Delta,
    FinishReason,
    GenerateCall,
    Terms,
    TokenLogprobs,
)
from shortfin_apps.llm.components.request.sampling_params import MAX_LOGPROBS, SamplingParams
from shortfin_apps.llm.contract.errors import InvalidRequestError, InvocationError, RequestAbortedError
from shortfin_apps.llm.serving.frontend.delta_stream import DeltaStream
from shortfin_apps.llm.serving.frontend.engine_client import EngineClient

_ABORTED = "the beam search was aborted"
MAX_BEAMS = 10  # leaves room in MAX_LOGPROBS for as many stop tokens as beams


def check_num_beams(num_beams: int, exported_top_k: int | None) -> None:
    """Raise InvalidRequestError for an unsupported number of beams.

    Scores come from full logits, but as upstream, a model's `exported_top_k` limits the number of beams, too.
    """
    if num_beams < 1:
        raise InvalidRequestError("`num_beams` must be at least 1", "num_beams")
    if exported_top_k is not None and num_beams > max(exported_top_k, 1):
        raise InvalidRequestError(
            f"`num_beams` is {num_beams}, but the model was compiled with a top_k of {exported_top_k}",
            "num_beams",
            {"exported_topk": exported_top_k, "requested_topk": num_beams},
        )
    if num_beams > MAX_BEAMS:
        raise InvalidRequestError(
            f"`num_beams` is {num_beams}, but at most {MAX_BEAMS} are possible", "num_beams"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A continuation with its cumulative log-probability `score`. `finish_reason` is None while it is live.

    `logprobs` has one entry per token if the request asked for log-probabilities, else it is empty.
    `stop_token_id`: the stop token that ended the continuation; None if an end-of-sequence token did.
    """

    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


class BeamSearch:
    """A search for continuations of one prompt; `call.params` has the stop conditions.

    Each step goes through the one-token continuations of all live beams, best first. A continuation that ends
    the sequence is finished; others become live beams, until there are `num_beams`. The search ends when
    `num_beams` are finished, or at `max_tokens`. One beam is greedy decoding.
    """

    def __init__(
        self,
        engine: EngineClient,
        call: GenerateCall,
        num_beams: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Callers must await `start` next, once. Raises InvalidRequestError for too many stop tokens."""
        self._engine = engine
        self._call = call
        self._num_beams = num_beams
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._began_s = clock()
        self._terminators = eos_token_ids | call.params.stop_token_ids
        self._step_params = self._make_step_params()
        self._num_tokens = 0
        self._live = [Hypothesis()]
        self._finished: list[Hypothesis] = []
        self._streams: dict[str, DeltaStream] = {}
        self._is_aborted = False
        self.num_cached_tokens = 0  # prompt tokens that the first step found in the prefix cache

    async def start(self) -> None:
        """Submit the first step. Raises the errors of `EngineClient.submit`."""
        try:
            await self._submit()
        except InvalidRequestError as error:
            if error.param != "logprobs":
                raise
            message = "`num_beams` must be 1: this model was compiled without logits, which rank the beams"
            raise InvalidRequestError(message, "num_beams") from None

    @property
    def done(self) -> bool:
        return not self._live

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The best `num_beams` finished hypotheses, best first."""
        ranked = sorted(self._finished, key=lambda hypothesis: -hypothesis.score)
        return ranked[: self._num_beams]

    async def step(self) -> float:
        """Add a token to every live beam and return the longest queueing time of its requests in seconds.

        Raises the engine's error if one of the beams has failed. All requests of the step have ended when
        this method returns, raises or is cancelled.
        """
        try:
            deltas = [_checked(await anext(stream)) for stream in self._streams.values()]
        finally:
            self.close()
        if self._is_aborted:
            raise RequestAbortedError(_ABORTED)
        if self._num_tokens == 0:
            self.num_cached_tokens = deltas[0].num_cached_tokens
        self._select(deltas)
        await self._submit()
        return max(delta.queue_s for delta in deltas)

    def abort(self) -> None:
        """Make the current step raise RequestAbortedError, even if the engine has already answered."""
        self._is_aborted = True
        for request_id in self._streams:
            self._engine.abort(request_id)

    def close(self) -> None:
        """Abort the requests of the current step. Closing twice is a no-op."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.close()

    def _make_step_params(self) -> SamplingParams:
        """Build parameters for one greedy token, with enough alternatives for `num_beams` continuations."""
        params = self._call.params
        width = self._num_beams + len(self._terminators)
        if width > MAX_LOGPROBS:
            raise InvalidRequestError(
                f"`stop_token_ids`: with {self._num_beams} beams, at most {MAX_LOGPROBS - self._num_beams}"
                " tokens, end-of-sequence included, may end a sequence",
                "stop_token_ids",
            )
        return SamplingParams(max_tokens=1, temperature=0.0, logprobs=max(width, params.logprobs or 0))

    def _step_terms(self) -> Terms:
        """Return the request's terms with the remaining time as timeout."""
        terms = self._call.terms
        if terms.timeout_s is None:
            return terms
        left_s = self._began_s + terms.timeout_s - self._clock()
        return replace(terms, timeout_s=max(left_s, 0.0))

    async def _submit(self) -> None:
        """Submit a request for the next token of each live beam."""
        terms = self._step_terms()
        for index, beam in enumerate(self._live):
            call = replace(
                self._call,
                request_id=f"{self._call.request_id}/{self._num_tokens}/{index}",
                prompt_token_ids=self._call.prompt_token_ids + beam.token_ids,
                params=self._step_params,
                resumes=self._num_tokens > 0,
                terms=terms,
            )
            self._streams[call.request_id] = await self._engine.submit(call)

    def _select(self, deltas: list[Delta]) -> None:
        """Replace the live beams by their best continuations, and move finished ones to `_finished`."""
        below_min_tokens = self._num_tokens < self._call.params.min_tokens
        self._num_tokens += 1
        candidates = _ranked(self._live, deltas)
        self._live = []
        for candidate in candidates:
            if len(self._live) == self._num_beams:
                break
            if below_min_tokens and candidate.token_id in self._terminators:
                continue
            hypothesis = self._extended(candidate)
            (self._live if hypothesis.finish_reason is None else self._finished).append(hypothesis)
        if len(self._finished) >= self._num_beams:
            self._live = []
        elif self._num_tokens == self._call.params.max_tokens:
            self._finished += [replace(beam, finish_reason=FinishReason.LENGTH) for beam in self._live]
            self._live = []

    def _extended(self, candidate: _Candidate) -> Hypothesis:
        params, parent, token_id = self._call.params, candidate.parent, candidate.token_id
        is_eos = token_id in self._eos_token_ids and not params.ignore_eos
        is_stop = token_id in params.stop_token_ids and not is_eos
        logprobs = parent.logprobs
        if params.logprobs is not None:
            logprobs += (TokenLogprobs(candidate.logprob, candidate.top[: params.logprobs], candidate.rank),)
        return Hypothesis(
            token_ids=(*parent.token_ids, token_id),
            score=candidate.score,
            logprobs=logprobs,
            finish_reason=FinishReason.STOP if is_eos or is_stop else None,
            stop_token_id=token_id if is_stop else None,
        )


class _Candidate(NamedTuple):
    """A live beam and a possible next token; `top` lists all possible next tokens of the beam."""

    score: float
    parent: Hypothesis
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    @property
    def rank(self) -> int:
        return 1 + sum(logprob > self.logprob for _, logprob in self.top)


def _ranked(beams: Sequence[Hypothesis], deltas: Sequence[Delta]) -> list[_Candidate]:
    """Return all candidates, best first; ties by better beam, then by lower token id."""
    candidates = []
    for beam, delta in zip(beams, deltas, strict=True):
        [step] = delta.logprobs
        candidates += [
            _Candidate(beam.score + logprob, beam, token_id, logprob, step.top)
            for token_id, logprob in step.top
        ]
    return sorted(candidates, key=lambda candidate: -candidate.score)


def _checked(delta: Delta) -> Delta:
    """Return the only delta of a one-token request, or raise the delta's error."""
    if delta.finish_reason is FinishReason.ABORT:
        raise delta.error or RequestAbortedError(_ABORTED)
    if delta.finish_reason is FinishReason.ERROR:
        raise delta.error or InvocationError("the engine failed under this request")
    return delta
