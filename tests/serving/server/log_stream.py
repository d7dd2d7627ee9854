"""A log on a stream of the test's own, and a stream that nobody reads."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from typing import TextIO, TypeVar

from shortfin_apps.llm.serving.server.logs import set_up

PIPE_BYTES = 4096  # the minimum on Linux

StreamT = TypeVar("StreamT", bound=TextIO)


@contextlib.contextmanager
def log_set_up(stream: StreamT) -> Iterator[StreamT]:
    """A JSON log, set up as in a new process; all lines are written when the context ends."""
    root = logging.getLogger()
    handlers, level_before = root.handlers[:], root.level
    root.handlers[:] = []
    set_up("info", "json", stream)
    try:
        yield stream
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(level_before)


@contextlib.contextmanager
def unread_pipe() -> Iterator[tuple[TextIO, TextIO]]:
    """The ends of a small pipe without a reader, as of a parent process that ignores the output."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    reader, writer = os.fdopen(reading), os.fdopen(writing, "w")
    yield reader, writer
    reader.close()  # first, so that a thread still writing gets an error instead of blocking
    with contextlib.suppress(OSError):
        writer.close()
