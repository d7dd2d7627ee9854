"""Converts the engine's token ids to text for requests in progress.

TextStream <── Delta (token_ids) ── detokenizer ── stop strings ──> TextDelta
TextBeams <── Hypothesis (token_ids) ── detokenizer ──> TextDelta, a complete answer each
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shortfin_apps.llm.components.request.messages import (
    DEFAULT_TERMS,
    Delta,
    FinishReason,
    GenerateCall,
    Terms,
    TokenLogprobs,
)
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.errors import InvocationError, LlmError, RequestAbortedError
from shortfin_apps.llm.serving.frontend.beam_search import BeamSearch, Hypothesis
from shortfin_apps.llm.serving.frontend.delta_stream import DeltaStream
from shortfin_apps.llm.serving.frontend.metrics import RequestTimer
from shortfin_apps.llm.serving.receipts.draft import ReceiptDraft, ReceiptOrder
from shortfin_apps.llm.serving.text.detokenizer import Detokenizer, StopMatcher
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """One prompt to continue, checked by `TextGenerator.fit`; `params` are for the engine.

    `choice`: number of the request among those for the same prompt, from 0. `conversation`: the prompt's text
    if prompt and answer are to be remembered. `shown_ids`: special tokens that are shown as text. With
    `num_beams` above 1, a beam search gives as many answers, and ignores stop strings and the sampling fields
    of `params`. If `generates` is False, the answer is EMPTY_ANSWER, and callers must not submit the request.
    With `receipt`, the answer has a receipt, and `params` must have `chosen_logits`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    shown_ids: frozenset[int] = frozenset()
    cache_salt: str | None = None
    num_beams: int = 1
    terms: Terms = DEFAULT_TERMS
    choice: int = 0
    conversation: str | None = None
    generates: bool = True
    receipt: ReceiptOrder | None = None

    def call(self, engine_id: str, *, is_traced: bool = False) -> GenerateCall:
        """Return the call to the engine, which knows the request as `engine_id`."""
        return GenerateCall(
            request_id=engine_id,
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            cache_salt=self.cache_salt,
            terms=self.terms,
            is_traced=is_traced,
        )

    def detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        """Return a new detokenizer for the text after the prompt."""
        return Detokenizer(
            tokenizer,
            self.prompt_token_ids,
            skip_special_tokens=self.skip_special_tokens,
            shown_ids=self.shown_ids,
        )


class TextDelta(NamedTuple):
    """New text and tokens of an answer, or a complete answer. Only the last delta has a `finish_reason`.

    `text` may be shorter than the text of `token_ids`: an incomplete character or a possible start of a stop
    string is held back. `logprobs` has one entry per token, or is empty. `stop_reason`: the stop string or
    stop token that ended the answer; None for end-of-sequence. `error`: cause of an abort that the client did
    not request. `receipt`: the receipt of the full answer as JSON objects, only in the last delta.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: LlmError | None = None
    receipt: dict[str, Any] | None = None

    @property
    def is_cut(self) -> bool:
        """True if the answer was truncated: neither the model nor a stop string ended it."""
        return self.finish_reason not in (None, FinishReason.STOP)


EMPTY_ANSWER = TextDelta(text="", token_ids=(), finish_reason=FinishReason.LENGTH)  # for `max_tokens: 0`


class PendingAnswer(ABC):
    """An admitted request. Subclasses: TextStream, with one answer, and TextBeams, with several.

    `on_end` is called once, with this object, when the request has ended.
    """

    def __init__(
        self, request: TextRequest, timer: RequestTimer, on_end: Callable[[PendingAnswer], None]
    ) -> None:
        self.request = request
        self.timer = timer
        self._on_end = on_end
        self._finished = False

    @abstractmethod
    async def answers(self) -> list[TextDelta]:
        """Wait for all complete answers and return them, best first. Cancelling this aborts the request."""

    @abstractmethod
    def abort(self) -> None:
        """End the request. The reader of a stream gets the output so far; of beams, RequestAbortedError."""

    def close(self) -> None:
        """Abort the request unless it has ended. Closing twice is a no-op."""
        if not self._finished:
            self._finish(FinishReason.ABORT)

    def _finish(self, reason: FinishReason) -> None:
        self._finished = True
        self.timer.finish(reason)
        self._on_end(self)
        self._release()

    @abstractmethod
    def _release(self) -> None:
        """End the request in the engine, if it is still running."""


class TextStream(PendingAnswer):
    """A request with one beam.

    The reader either awaits `answers`, or calls `listen` and then `take` at each notification, until the end
    or `close`, which aborts the request.
    """

    def __init__(
        self,
        request: TextRequest,
        tokenizer: Tokenizer,
        deltas: DeltaStream,
        abort: Callable[[], object],
        timer: RequestTimer,
        on_end: Callable[[PendingAnswer], None],
    ) -> None:
        """Read `deltas` from the engine; `abort` must end the request in the engine."""
        assert request.num_beams == 1, "a beam search cannot be streamed"
        super().__init__(request, timer, on_end)
        self._deltas = deltas
        self._abort = abort
        self._detokenizer = request.detokenizer(tokenizer)
        self._special_ids = tokenizer.special_ids - request.shown_ids
        self._matcher = StopMatcher(request.stop, include_match=request.include_stop)
        self._num_tokens = 0
        self._read_deltas: list[TextDelta] = []  # kept for a conversation only
        order = request.receipt
        self._receipt = None if order is None else ReceiptDraft(order, request.prompt_token_ids)

    def listen(self, on_delta: Callable[[], None]) -> None:
        """Register `on_delta`, called in the event loop whenever there is something to `take`."""
        self._deltas.on_delta = on_delta

    def take(self) -> TextDelta | None:
        """Return all unread output, or None if there is none. Raises the error that ended the request."""
        delta = None if self._finished else self._deltas.take()
        return None if delta is None else self._text_of(delta)

    def _text_of(self, delta: Delta) -> TextDelta:
        if delta.computed and self.timer.computed is not None:
            self.timer.computed += delta.computed
        if delta.finish_reason is FinishReason.ERROR:
            raise self._fail(delta.error or InvocationError("the engine failed under this request"))
        if delta.error is not None and self._num_tokens == 0 and not delta.token_ids:
            raise self._fail(delta.error, FinishReason.ABORT)  # no partial answer to return
        text_delta = self._read(delta) if self.timer.computed is None else self._read_traced(delta)
        if self._receipt is not None:
            text_delta = _with_receipt(text_delta, delta, self._receipt)
        if self.request.conversation is not None:
            self._read_deltas.append(text_delta)
        self.timer.tokens(len(text_delta.token_ids), delta.queue_s, delta.num_cached_tokens)
        if text_delta.finish_reason is not None:
            self._finish(text_delta.finish_reason)
        return text_delta

    def abort(self) -> None:
        self._abort()

    @property
    def conversation(self) -> tuple[str, tuple[int, ...]] | None:
        """The text of the conversation including the answer, and its token ids.

        None if the answer is incomplete, or if its tokens (without a final stop token) are not exactly its
        text.
        """
        prompt, request = self.request.conversation, self.request
        if prompt is None or not self._read_deltas or request.include_stop:
            return None
        answer = _join(self._read_deltas)
        is_stopped = answer.finish_reason is FinishReason.STOP
        is_whole = is_stopped or answer.finish_reason is FinishReason.LENGTH
        token_ids = answer.token_ids[:-1] if is_stopped else answer.token_ids
        if self._matcher.matched or not is_whole or not self._special_ids.isdisjoint(token_ids):
            return None
        return prompt + answer.text, (*request.prompt_token_ids, *token_ids)

    async def answers(self) -> list[TextDelta]:
        try:
            return [_join(await self._all())]
        finally:
            self.close()

    async def _all(self) -> list[TextDelta]:
        """Collect every delta as soon as it arrives, so that a stop string ends the request in time."""
        deltas: list[TextDelta] = []
        ended = asyncio.get_running_loop().create_future()

        def read() -> None:
            if ended.done():  # or just cancelled
                return
            try:
                if (delta := self.take()) is not None:
                    deltas.append(delta)
            except Exception as error:
                ended.set_exception(error)
            else:
                if self._finished:
                    ended.set_result(None)

        self.listen(read)
        read()
        await ended
        return deltas

    def _read(self, delta: Delta) -> TextDelta:
        """Convert token ids to text, up to a stop string, at which the result has a `finish_reason`."""
        text, num_tokens = "", len(delta.token_ids)
        hides_last = delta.finish_reason is FinishReason.STOP and not self.request.include_stop
        for position, token_id in enumerate(delta.token_ids, 1):
            if position < num_tokens or not hides_last:
                text += self._match(self._detokenizer.push(token_id))
            self._num_tokens += 1
            if self._matcher.matched is not None:
                return self._delta(delta, text, position)
        if delta.finish_reason is not None:
            text += self._match(self._detokenizer.finish())
            text += self._matcher.finish()
        return self._delta(delta, text, num_tokens)

    def _read_traced(self, delta: Delta) -> TextDelta:
        with self.timer.detokenising():
            return self._read(delta)

    def _match(self, piece: str) -> str:
        if not self.request.stop or self._num_tokens + 1 < self.request.params.min_tokens:
            return piece  # no stop strings, or fewer than `min_tokens` so far
        return self._matcher.push(piece)

    def _delta(self, delta: Delta, text: str, num_tokens: int) -> TextDelta:
        matched = self._matcher.matched
        return TextDelta(  # positional arguments take half the time
            text,
            delta.token_ids[:num_tokens],
            delta.logprobs[:num_tokens],
            delta.num_cached_tokens,
            delta.finish_reason if matched is None else FinishReason.STOP,
            delta.stop_token_id if matched is None else matched,
            delta.error,
        )

    def _fail(self, error: Exception, reason: FinishReason = FinishReason.ERROR) -> Exception:
        self._finish(reason)
        return error

    def _release(self) -> None:
        self._deltas.close()


class TextBeams(PendingAnswer):
    """A request answered by beam search. The metrics count it as one request with one token per step."""

    def __init__(
        self,
        request: TextRequest,
        tokenizer: Tokenizer,
        search: BeamSearch,
        timer: RequestTimer,
        on_end: Callable[[PendingAnswer], None],
    ) -> None:
        super().__init__(request, timer, on_end)
        self._tokenizer = tokenizer
        self._search = search

    async def answers(self) -> list[TextDelta]:
        try:
            while not self._search.done:
                queue_s = await self._search.step()
                self.timer.tokens(1, queue_s, self._search.num_cached_tokens)
            answers = [self._read(hypothesis) for hypothesis in self._search.hypotheses]
        except Exception as error:
            aborted = isinstance(error, RequestAbortedError)
            self._finish(FinishReason.ABORT if aborted else FinishReason.ERROR)
            raise
        else:
            self._finish(answers[0].finish_reason or FinishReason.LENGTH)
            return answers
        finally:
            self.close()

    def abort(self) -> None:
        self._search.abort()

    def _release(self) -> None:
        self._search.close()

    def _read(self, hypothesis: Hypothesis) -> TextDelta:
        return TextDelta(
            text=self._text(hypothesis),
            token_ids=hypothesis.token_ids,
            logprobs=hypothesis.logprobs,
            num_cached_tokens=self._search.num_cached_tokens,
            finish_reason=hypothesis.finish_reason,
            stop_reason=hypothesis.stop_token_id,
        )

    def _text(self, hypothesis: Hypothesis) -> str:
        token_ids = hypothesis.token_ids
        if hypothesis.finish_reason is FinishReason.STOP and not self.request.include_stop:
            token_ids = token_ids[:-1]
        detokenizer = self.request.detokenizer(self._tokenizer)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()


async def gather(streams: Sequence[TextStream]) -> list[TextDelta]:
    """Return the answers of the streams, one each; see `gather_answers`."""
    return [answer for [answer] in await gather_answers(streams)]


async def gather_answers(requests: Sequence[PendingAnswer]) -> list[list[TextDelta]]:
    """Return all complete answers, in order. If one fails or this is cancelled, the others are aborted."""
    tasks = [asyncio.ensure_future(request.answers()) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        close_all(requests)


def close_all(requests: Sequence[PendingAnswer]) -> None:
    for request in requests:
        request.close()


def _join(deltas: Sequence[TextDelta]) -> TextDelta:
    last = deltas[-1]
    return TextDelta(
        text="".join(d.text for d in deltas),
        token_ids=tuple(itertools.chain.from_iterable(d.token_ids for d in deltas)),
        logprobs=tuple(itertools.chain.from_iterable(d.logprobs for d in deltas)),
        num_cached_tokens=max(d.num_cached_tokens for d in deltas),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        receipt=last.receipt,
    )


def _with_receipt(text_delta: TextDelta, delta: Delta, draft: ReceiptDraft) -> TextDelta:
    """Add the tokens to the receipt; return `text_delta`, with the receipt if it is the last delta.

    `delta` may have more tokens than `text_delta`: the ones after a stop string.
    """
    draft.add(text_delta.token_ids, delta.logits[: len(text_delta.token_ids)])
    reason = text_delta.finish_reason
    return text_delta if reason is None else text_delta._replace(receipt=draft.finish(reason))
