"""Checks, tokenises and submits prompts. text_stream.py converts the output tokens to text.

TextGenerator.submit ── GenerateCall ──> EngineClient
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TypeVar

from shortfin_apps.llm.components.grammar.compiler import GrammarCompiler
from shortfin_apps.llm.contract.errors import ContextLengthError, InvalidRequestError
from shortfin_apps.llm.serving.frontend.beam_search import BeamSearch
from shortfin_apps.llm.serving.frontend.engine_client import EngineClient
from shortfin_apps.llm.serving.frontend.metrics import RequestTimer, ServerMetrics
from shortfin_apps.llm.serving.frontend.text_stream import (
    PendingAnswer,
    TextBeams,
    TextRequest,
    TextStream,
    close_all,
)
from shortfin_apps.llm.serving.frontend.text_workers import TextWorkers
from shortfin_apps.llm.serving.text.conversations import Conversations
from shortfin_apps.llm.serving.text.tokenizer import LONG_TEXT, Tokenizer, first_out_of_range

current_is_traced: ContextVar[bool] = ContextVar("current_is_traced", default=False)
"""True if requests submitted by the current task are traced, so that their timers have `computed`."""

PendingT = TypeVar("PendingT", bound=PendingAnswer)


class TextGenerator:
    """The routes' interface to the engine: checks prompts against the model and submits them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        engine: EngineClient,
        *,
        max_seq_len: int,
        max_requests: int,
        metrics: ServerMetrics,
        request_timeout_s: float | None = None,
        conversation_tokens: int = 0,
        grammars: GrammarCompiler | None = None,
        id_prefix: str = "",
    ) -> None:
        """`id_prefix` distinguishes this process's engine request ids from other processes' ids."""
        self.tokenizer = tokenizer
        self.engine = engine
        self.max_seq_len = max_seq_len
        self._max_requests = max_requests
        self._metrics = metrics
        self._request_timeout_s = request_timeout_s
        self._id_prefix = id_prefix
        self._serial = itertools.count()
        self.workers = TextWorkers()
        self.grammars = grammars or GrammarCompiler(tokenizer.to_json, tokenizer.eos_token_ids)
        self._conversations = Conversations(tokenizer.split_names, conversation_tokens)
        self._pending: dict[str, list[PendingAnswer]] = {}  # by the client's request id, which is not unique

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, rendered: bool = False, param: str | None = None
    ) -> tuple[int, ...]:
        """Return the token ids of `text`, computed in a worker thread if it is long; see `Tokenizer.encode`.

        If the text is a prompt, callers must pass the request field's name as `param`. A text that cannot fit
        the context with any tokenisation then raises InvalidRequestError before any work.
        """
        if param is not None:
            self._check_length(text, param)
        encode = partial(self.tokenizer.encode, add_special_tokens=add_special_tokens, rendered=rendered)
        return tuple(
            encode(text) if len(text) < LONG_TEXT else await self.workers.run(len(text), encode, text)
        )

    async def encode_conversation(self, text: str, cache_salt: str | None, param: str) -> tuple[int, ...]:
        """Return the token ids of a text rendered by the chat template.

        Earlier answers in the text get their generated token ids, if these are remembered. See `encode`.
        """
        self._check_length(text, param)
        recall = partial(self._conversations.recall, text, cache_salt)
        known = recall() if len(text) < LONG_TEXT else await self.workers.run(len(text), recall)
        rest = await self.encode(text[known.num_chars :], add_special_tokens=False, rendered=True)
        return (*known.token_ids, *rest)

    def _check_length(self, text: str, param: str) -> None:
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest > self.max_seq_len:
            raise ContextLengthError(
                f"`{param}` has {len(text):,} characters, so at least {fewest:,} tokens, but the model's"
                f" context is {self.max_seq_len}",
                param,
            )

    def fit(
        self, prompt_token_ids: Sequence[int], max_tokens: int | None, *, default: int | None, param: str
    ) -> int:
        """Return the number of tokens to generate: `max_tokens`, else `default`, else all that fit.

        Returns 1 for a `max_tokens` of 0: such a request is checked but never submitted, so its prompt may be
        empty. A default is reduced to fit; a given `max_tokens` is not. Raises InvalidRequestError if the
        prompt (request field `param`) is empty or has an unknown token id, and ContextLengthError if it or
        `max_tokens` does not fit the context.
        """
        if max_tokens == 0:
            self.check_ids(prompt_token_ids, param)
            return 1
        if not prompt_token_ids:
            raise InvalidRequestError(f"`{param}` must hold at least one token", param)
        room = self.max_seq_len - len(prompt_token_ids)
        if room < 1:
            raise ContextLengthError(
                f"`{param}` has {len(prompt_token_ids)} tokens, but the model's context is {self.max_seq_len}"
                " and must have room for one more",
                param,
            )
        self.check_ids(prompt_token_ids, param)
        if max_tokens is None:
            return room if default is None else min(default, room)
        if max_tokens > room:
            raise ContextLengthError(
                f"`max_tokens` is {max_tokens}, but the model's context of {self.max_seq_len} has room for"
                f" {room} after a prompt of {len(prompt_token_ids)}",
                "max_tokens",
            )
        return max_tokens

    def check_ids(self, prompt_token_ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequestError for an unknown token id, or more tokens than the context holds."""
        if len(prompt_token_ids) > self.max_seq_len:
            raise ContextLengthError(
                f"`{param}` has {len(prompt_token_ids)} tokens, but "
                f"the model's context is {self.max_seq_len}",
                param,
            )
        if (bad_id := first_out_of_range(prompt_token_ids, self.tokenizer.vocab_size)) is not None:
            size = self.tokenizer.vocab_size
            raise InvalidRequestError(f"`{param}`: token id {bad_id} is not in [0, {size})", param)

    def check_count(self, num_sequences: int, param: str | None = None) -> None:
        """Raise InvalidRequestError for more sequences than the queue can hold."""
        if num_sequences > self._max_requests:
            field = f"`{param}`: " if param else ""
            raise InvalidRequestError(
                f"{field}{num_sequences} sequences in one request can never fit: the queue has"
                f" {self._max_requests} places",
                param,
            )

    async def submit(self, requests: Sequence[TextRequest]) -> list[TextStream]:
        """Admit all requests, which must have one beam each; if one is refused, admit none and raise."""
        return await self._admit(requests, self._stream)

    async def submit_whole(self, requests: Sequence[TextRequest]) -> list[PendingAnswer]:
        """Admit requests as `submit` does, for complete answers; each request may be a beam search."""
        return await self._admit(requests, self._start)

    def abort(self, request_id: str, tenant: str | None = None) -> int:
        """Abort the sequences of the requests with this id (and of `tenant`, if given).

        Returns their number.
        """
        return _abort_each(
            pending
            for pending in self._pending.get(request_id, [])
            if tenant is None or pending.request.terms.tenant == tenant
        )

    def abort_all(self) -> int:
        """Abort all sequences and return their number."""
        return _abort_each(itertools.chain.from_iterable(self._pending.values()))

    def close(self) -> None:
        """End the threads for texts and grammars. Callers must submit no request afterwards."""
        self.workers.close()
        self.grammars.close()

    async def _admit(
        self, requests: Sequence[TextRequest], start: Callable[[TextRequest], Awaitable[PendingT]]
    ) -> list[PendingT]:
        self.check_count(len(requests))
        self._check_tokens(requests)
        started: list[PendingT] = []
        try:
            for request in requests:
                started.append(await start(self._within_timeout(request)))
                self._pending.setdefault(request.request_id, []).append(started[-1])
        except BaseException as error:
            self._metrics.rejected(error)
            close_all(started)
            raise
        return started

    def _check_tokens(self, requests: Sequence[TextRequest]) -> None:
        """Raise InvalidRequestError for several prompts with more tokens than the full queue can hold."""
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        if len(requests) > 1 and num_tokens > self.engine.max_queue_tokens:
            raise InvalidRequestError(
                f"{num_tokens} prompt tokens in one request of {len(requests)} sequences can never fit: the"
                f" queue has room for {self.engine.max_queue_tokens}; send several requests"
            )

    def _within_timeout(self, request: TextRequest) -> TextRequest:
        limit, wanted = self._request_timeout_s, request.terms.timeout_s
        if limit is None or (wanted is not None and wanted <= limit):
            return request
        return replace(request, terms=replace(request.terms, timeout_s=limit))

    def _forget(self, ended: PendingAnswer) -> None:
        request_id = ended.request.request_id
        self._pending[request_id].remove(ended)
        if not self._pending[request_id]:
            del self._pending[request_id]
        if isinstance(ended, TextStream) and (conversation := ended.conversation) is not None:
            self._conversations.remember(*conversation, ended.request.cache_salt)

    async def _start(self, request: TextRequest) -> PendingAnswer:
        return await (self._stream(request) if request.num_beams == 1 else self._beams(request))

    async def _stream(self, request: TextRequest) -> TextStream:
        engine_id, timer = self._engine_id(request), self._timer(request)
        deltas = await self.engine.submit(request.call(engine_id, is_traced=current_is_traced.get()))
        abort = partial(self.engine.abort, engine_id)
        return TextStream(request, self.tokenizer, deltas, abort, timer, self._forget)

    async def _beams(self, request: TextRequest) -> TextBeams:
        call = request.call(self._engine_id(request))
        timer = self._timer(request)
        search = BeamSearch(self.engine, call, request.num_beams, self.tokenizer.eos_token_ids)
        await search.start()
        return TextBeams(request, self.tokenizer, search, timer, self._forget)

    def _engine_id(self, request: TextRequest) -> str:
        """Return a unique id, as clients' ids need not be unique."""
        return f"{request.request_id}.{self._id_prefix}{next(self._serial)}"

    def _timer(self, request: TextRequest) -> RequestTimer:
        return self._metrics.start_request(
            len(request.prompt_token_ids),
            request.params.max_tokens,
            tenant=request.terms.tenant,
            is_traced=current_is_traced.get(),
        )


def _abort_each(pending: Iterable[PendingAnswer]) -> int:
    listed = list(pending)
    for each in listed:
        each.abort()
    return len(listed)
