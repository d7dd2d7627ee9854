"""Renders chat templates in another process, where they can be ended; see template_process.py."""

from __future__ import annotations

import json
import logging
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from shortfin_apps.llm.components.text.chat_template import check_syntax
from shortfin_apps.llm.components.text.template_process import TEMPLATE_LIMITS
from shortfin_apps.llm.errors import ArtifactError, InvalidRequestError, LlmError, OverloadedError
from shortfin_apps.llm.limited_process import NUM_ANSWERS, LimitedProcess, Limits, arguments_of

TEMPLATE_PROCESS = "shortfin_apps.llm.components.text.template_process"

SLACK_S = 5.0  # that an answer may take longer than the limits, as the process may have to fork first

logger = logging.getLogger(__name__)

Answers = list[Any]  # of a worker: both, unless it was ended

_processes: weakref.WeakValueDictionary[Limits, LimitedProcess] = weakref.WeakValueDictionary()
_lock = threading.Lock()  # for `_processes`


class TemplateLimitError(InvalidRequestError):
    """A rendering hit a limit, which says nothing of what the template would have written."""


class BoundedTemplate:
    """A template whose renderings cannot outlast `limits`. Thread-safe: each thread has a worker of its own.

    The process starts when it is first needed, serves all templates with the same limits, and ends with the
    last of them. Raises ArtifactError for a source that cannot be parsed.
    """

    def __init__(self, source: str, limits: Limits = TEMPLATE_LIMITS) -> None:
        check_syntax(source)
        self._source = _line(source)
        self._limits = limits
        self._process: LimitedProcess | None = None
        self._idle: list[socket.socket] = []
        self.close = weakref.finalize(self, _close, self._idle)

    def prepare(self) -> None:
        """Starts a worker, so that the first rendering need not wait. Raises ArtifactError."""
        try:
            self._idle.append(self._new_worker())
        except InvalidRequestError as error:
            raise ArtifactError(f"{error}; correct it in the model's tokenizer_config.json") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The rendered text. Raises InvalidRequestError if the template fails or hits a limit.

        Raises OverloadedError where the process is out of reach.
        """
        work = _line([list(messages), add_generation_prompt, dict(variables)])
        answers: Answers = []
        with suppress(IndexError):
            answers = self._ask(self._idle.pop(), work)
        if not answers:  # no worker is idle, or it has ended since it was used last
            answers = self._ask(self._new_worker(), work)
        return self._text(answers)

    def _ask(self, worker: socket.socket, work: bytes) -> Answers:
        """A worker's answers; it is kept for further work unless it has ended."""
        answers = _exchange(worker, work)
        if len(answers) == NUM_ANSWERS:
            self._idle.append(worker)
        else:
            worker.close()
        return answers

    def _new_worker(self) -> socket.socket:
        """A connection to a worker that has compiled the template. Raises as `render` does."""
        try:
            self._process = _process(self._limits)
            worker = self._process.new_worker()
            worker.settimeout(self._limits.wall_s + SLACK_S)
        except OSError as error:  # no more processes or files, or the process has ended
            logger.warning("chat templates cannot be rendered: %s", error)
            raise _out_of_reach() from None
        try:
            self._text(_exchange(worker, self._source))
        except LlmError:
            worker.close()
            raise
        return worker

    def _text(self, answers: Answers) -> str:
        match answers:
            case []:
                raise _out_of_reach()
            case [_]:
                raise TemplateLimitError(_bounds(self._limits), "messages")
        text, problem = answers[-1]
        if problem is not None:
            raise InvalidRequestError(problem, "messages")
        return str(text)


def _process(limits: Limits) -> LimitedProcess:
    """The process with these limits; another one where it has ended. Raises OSError."""
    with _lock:
        process = _processes.get(limits)
        if process is None or process.is_over:
            process = LimitedProcess(TEMPLATE_PROCESS, arguments_of(limits))
            _processes[limits] = process
        return process


def _line(work: object) -> bytes:
    return json.dumps(work).encode() + b"\n"


def _exchange(worker: socket.socket, work: bytes) -> Answers:
    received, num_lines = [], 0
    with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
        worker.sendall(work)
        while num_lines < NUM_ANSWERS and (part := worker.recv(1 << 18)):
            received.append(part)
            num_lines += part.count(b"\n")
    lines = b"".join(received).split(b"\n")
    return [json.loads(line) for line in lines[:-1]]


def _bounds(limits: Limits) -> str:
    return (
        f"the chat template takes more than {limits.cpu_s:g} s of a processor, {limits.wall_s:g} s in all or"
        f" {limits.memory_bytes >> 20} MiB"
    )


def _out_of_reach() -> OverloadedError:
    return OverloadedError("no chat template can be rendered now; try again")


def _close(idle: list[socket.socket]) -> None:
    for worker in idle:
        worker.close()
