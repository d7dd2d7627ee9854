"""Renders chat templates in another process, where a rendering can be killed; see template_process.py."""

from __future__ import annotations

import json
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from shortfin_apps.llm.contract.errors import ArtifactError, InvalidRequestError, LlmError, OverloadedError
from shortfin_apps.llm.limited_process import Answers, Clock, LimitedProcess, Limits, Workers, arguments_of
from shortfin_apps.llm.serving.text.chat_template import check_syntax
from shortfin_apps.llm.serving.text.template_process import NOTHING, TEMPLATE_LIMITS

TEMPLATE_PROCESS = "shortfin_apps.llm.serving.text.template_process"

_processes: weakref.WeakValueDictionary[Limits, LimitedProcess] = weakref.WeakValueDictionary()
_lock = threading.Lock()  # for `_processes`


class TemplateLimitError(InvalidRequestError):
    """A rendering reached a limit of time or memory; another attempt may succeed."""


class BoundedTemplate:
    """A template whose renderings are killed at `limits`. Thread-safe: each thread has its own worker.

    The rendering process starts when it is first needed, serves all templates with the same limits, and ends
    with the last of these templates. Raises ArtifactError for a source that cannot be parsed.
    """

    def __init__(self, source: str, limits: Limits = TEMPLATE_LIMITS, clock: Clock = time.monotonic) -> None:
        check_syntax(source)
        self._source = _line(source)
        self._limits = limits
        self._process: LimitedProcess | None = None
        self._workers = Workers("chat templates", limits, clock)
        self.close = self._workers.close

    def prepare(self) -> None:
        """Start a worker, so that the first rendering does not wait for one. Raises ArtifactError."""
        try:
            self._text(self._workers.ask(NOTHING, self._begin))
        except InvalidRequestError as error:
            raise ArtifactError(f"{error}; correct it in the model's tokenizer_config.json") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the rendered text. Raises InvalidRequestError if the template fails or reaches a limit.

        Raises OverloadedError if the process cannot be reached.
        """
        work = _line([list(messages), add_generation_prompt, dict(variables)])
        return self._text(self._workers.ask(work, self._begin))

    def _begin(self) -> socket.socket:
        """Connect to a new worker and let it compile the template. Raises OSError and `render`'s errors."""
        self._process = _process(self._limits)
        worker = self._process.new_worker()
        try:
            self._text(self._workers.exchange(worker, self._source))
        except LlmError:
            worker.close()
            raise
        return worker

    def _text(self, answers: Answers) -> str:
        match answers:
            case []:
                raise OverloadedError("no chat template can be rendered now; try again")
            case [_]:
                raise TemplateLimitError(_bounds(self._limits), "messages")
        text, problem = answers[-1]
        if problem is not None:
            raise InvalidRequestError(problem, "messages")
        return str(text)


def _process(limits: Limits) -> LimitedProcess:
    """Return the rendering process with these limits, started again if it has ended. Raises OSError."""
    with _lock:
        process = _processes.get(limits)
        if process is None or process.is_over:
            process = LimitedProcess(TEMPLATE_PROCESS, arguments_of(limits))
            _processes[limits] = process
        return process


def _line(work: object) -> bytes:
    return json.dumps(work).encode() + b"\n"


def _bounds(limits: Limits) -> str:
    return (
        f"the chat template takes more than {limits.cpu_s:g} s of a processor, {limits.wall_s:g} s in all or"
        f" {limits.memory_bytes >> 20} MiB"
    )
