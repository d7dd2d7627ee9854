"""The server's log on stderr: lines of text or of JSON, with a record's extra fields in both.

Nothing that a client sent can start a line of its own or speak to a terminal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import re
import sys
import threading
from typing import Literal, TextIO

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from shortfin_apps.llm.api.access_log import current_request_id

LogFormat = Literal["text", "json"]

MAX_LINES = 10_000  # that wait to be written
FLUSH_S = 2.0  # how long an end waits for a reader

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
JSON = "%(levelname)s %(name)s %(message)s"
JSON_NAMES = {"levelname": "level", "name": "logger"}
# The fields that are not a record's own; uvicorn repeats a message in colours.
WARNING = {"levelno": logging.WARNING, "levelname": "WARNING"}
NO_EXTRAS = frozenset({*RESERVED_ATTRS, "taskName", "color_message"})
PLAIN_WORD = re.compile(r"""[^\s"'=\\\x00-\x20\x7f-\U0010ffff]+""")


def set_up(level: str, form: LogFormat, stream: TextIO | None = None) -> None:
    """Sends all that is logged to `stream` (default: stderr), each line with the request it belongs to."""
    handler = BackgroundHandler(stream or sys.stderr)
    handler.setFormatter(formatter(form))
    handler.addFilter(_add_request_id)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def flush() -> None:
    """Waits until what was logged is written, for a short while."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def formatter(form: LogFormat) -> logging.Formatter:
    if form == "text":
        return TextFormatter(TEXT)
    return JsonFormatter(JSON, rename_fields=JSON_NAMES, reserved_attrs=sorted(NO_EXTRAS), timestamp="time")


class BackgroundHandler(logging.Handler):
    """Writes lines in a thread of its own, so that a log which nobody reads holds up nobody.

    At most MAX_LINES wait; further ones are dropped, and how many is said once there is a reader again.
    Only the thread touches the stream.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._num_dropped = 0
        self._counting = threading.Lock()
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            with self._counting:
                self._num_dropped += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Waits until all lines are written, for FLUSH_S at most."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: self._lines.unfinished_tasks == 0, FLUSH_S)

    def close(self) -> None:
        self.flush()
        with contextlib.suppress(queue.Full):  # nobody reads: the thread ends with the process
            self._lines.put_nowait(None)
        super().close()

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)
            if self._num_dropped and self._lines.empty():
                self._tell_dropped()
            self._lines.task_done()
        self._lines.task_done()

    def _tell_dropped(self) -> None:
        with self._counting:
            count, self._num_dropped = self._num_dropped, 0
        message = f"the log was not read in time, so {count} lines are missing"
        self._write(self.format(logging.makeLogRecord({"name": __name__, "msg": message, **WARNING})))

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed, or no reader left: there is nobody to tell
            self._stream.write(f"{line}\n")
            self._stream.flush()


class TextFormatter(logging.Formatter):
    """A line a record, its extra fields as `name=value`; a traceback's lines follow it, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        extras = {name: value for name, value in vars(record).items() if name not in NO_EXTRAS}
        words = [_escaped(super().formatMessage(record))]
        return " ".join([*words, *(f"{name}={_word(value)}" for name, value in extras.items())])

    def format(self, record: logging.LogRecord) -> str:
        first, *traceback = super().format(record).split("\n")
        return "\n".join([first, *(f"  {_escaped(line)}" for line in traceback)])


def _add_request_id(record: logging.LogRecord) -> bool:
    if (request_id := current_request_id.get()) and not hasattr(record, "request_id"):
        record.request_id = request_id
    return True


def _word(value: object) -> str:
    """`value` as one word: as it is where that is plain, else as a JSON string."""
    text = "-" if value is None else str(value)
    return text if PLAIN_WORD.fullmatch(text) else json.dumps(text)


def _escaped(text: str) -> str:
    """`text` with all that does not print (line breaks, terminals' escapes, bidi marks) as `\\x..`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
