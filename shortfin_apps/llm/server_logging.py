"""The server's log on stderr: lines of text or of JSON, with a record's extra fields in both.

Nothing that a client sent can start a line of its own or speak to a terminal.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Literal, TextIO

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from shortfin_apps.llm.api.access_log import current_request_id

LogFormat = Literal["text", "json"]

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
JSON = "%(levelname)s %(name)s %(message)s"
JSON_NAMES = {"levelname": "level", "name": "logger"}
# The fields that are not a record's own; uvicorn repeats a message in colours.
NO_EXTRAS = frozenset({*RESERVED_ATTRS, "taskName", "color_message"})
PLAIN_WORD = re.compile(r"""[^\s"'=\\\x00-\x20\x7f-\U0010ffff]+""")


def set_up(level: str, form: LogFormat, stream: TextIO | None = None) -> None:
    """Sends all that is logged to `stream` (default: stderr), each line with the request it belongs to."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(form))
    handler.addFilter(_add_request_id)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def formatter(form: LogFormat) -> logging.Formatter:
    if form == "text":
        return TextFormatter(TEXT)
    return JsonFormatter(JSON, rename_fields=JSON_NAMES, reserved_attrs=sorted(NO_EXTRAS), timestamp="time")


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
