"""The server's log on stderr, as text or JSON, both with a record's extra fields.

Text from clients is escaped: it cannot start a new line or contain terminal escapes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import re
import sys
import threading
from datetime import UTC, datetime
from typing import Literal, TextIO

from shortfin_apps.llm.serving.http.request_id import current_request_id

LogFormat = Literal["text", "json"]

MAX_LINES = 10_000  # maximum length of the queue of lines to write
FLUSH_S = 2.0  # maximum wait for the queue to be written

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
WARNING = {"levelno": logging.WARNING, "levelname": "WARNING"}
# Attributes of a record that are not extra fields; uvicorn's `color_message` repeats the message.
NOT_EXTRA = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"})
PLAIN_WORD = re.compile(r"""[^\s"'=\\\x00-\x20\x7f-\U0010ffff]+""")


def set_up(level: str, form: LogFormat, stream: TextIO | None = None) -> None:
    """Log to `stream` (default: stderr), with the id of the current request in each line."""
    handler = BackgroundHandler(stream or sys.stderr)
    handler.setFormatter(formatter(form))
    handler.addFilter(_add_request_id)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def quieten_uvicorn(level: str) -> None:
    """Suppress uvicorn's start and stop messages, because this server logs its own."""
    if level == "info":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


def flush() -> None:
    """Wait until all log lines are written, for FLUSH_S at most."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def write_line(line: str) -> None:
    """Write a line of another process's log unchanged, after earlier lines; never blocks."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, BackgroundHandler):
            handler.write_line(line)


def formatter(form: LogFormat) -> logging.Formatter:
    return TextFormatter(TEXT) if form == "text" else JsonFormatter()


class BackgroundHandler(logging.Handler):
    """Writes lines in its own thread, so that a blocked reader of the log blocks nothing else.

    At most MAX_LINES are queued; further lines are dropped, and their number is logged once the reader
    continues. Only this thread writes to the stream.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._num_dropped = 0
        self._dropped_lock = threading.Lock()
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.write_line(self.format(record))
        except Exception:
            self.handleError(record)

    def write_line(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            with self._dropped_lock:
                self._num_dropped += 1

    def flush(self) -> None:
        """Wait until all lines are written, for FLUSH_S at most."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: self._lines.unfinished_tasks == 0, FLUSH_S)

    def close(self) -> None:
        self.flush()
        with contextlib.suppress(queue.Full):  # blocked reader: the thread ends with the process
            self._lines.put_nowait(None)
        super().close()

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)
            if self._num_dropped and self._lines.empty():
                self._report_dropped()
            self._lines.task_done()
        self._lines.task_done()

    def _report_dropped(self) -> None:
        with self._dropped_lock:
            count, self._num_dropped = self._num_dropped, 0
        message = f"the log was not read fast enough: {count} lines were dropped"
        self._write(self.format(logging.makeLogRecord({"name": __name__, "msg": message, **WARNING})))

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream is closed or has no reader
            self._stream.write(f"{line}\n")
            self._stream.flush()


class TextFormatter(logging.Formatter):
    """Formats a record as one line with extra fields as `name=value`, then any traceback, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        words = [_escaped(super().formatMessage(record))]
        return " ".join([*words, *(f"{name}={_word(value)}" for name, value in _extras(record).items())])

    def format(self, record: logging.LogRecord) -> str:
        first, *traceback = super().format(record).split("\n")
        return "\n".join([first, *(f"  {_escaped(line)}" for line in traceback)])


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: message, extra fields, `exc_info` (traceback), `time` (UTC)."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exc_info"] = self.formatException(record.exc_info)
        time = datetime.fromtimestamp(record.created, UTC).isoformat()
        return json.dumps({**line, **_extras(record), "time": time}, default=str)


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in NOT_EXTRA}


def _add_request_id(record: logging.LogRecord) -> bool:
    if (request_id := current_request_id.get()) and not hasattr(record, "request_id"):
        record.request_id = request_id
    return True


def _word(value: object) -> str:
    """Return `value` unchanged if it has no spaces or quotes, otherwise as a JSON string."""
    text = "-" if value is None else str(value)
    return text if PLAIN_WORD.fullmatch(text) else json.dumps(text)


def _escaped(text: str) -> str:
    r"""Return `text` with unprintable characters (line breaks, terminal escapes, bidi marks) as `\x..`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
