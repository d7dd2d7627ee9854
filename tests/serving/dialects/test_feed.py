"""Reading takes work in proportion to the text, however it is cut."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, SupportsIndex

import pytest

from shortfin_apps.llm.serving.dialects.choose import REASONING_DIALECTS, TOOL_DIALECTS
from shortfin_apps.llm.serving.dialects.dialect import Dialect, Function
from shortfin_apps.llm.serving.dialects.feed import Feed
from shortfin_apps.llm.serving.dialects.output_parser import OutputParser

NUM_CHARS = 600
BEGINS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": "',
    "smollm": '<tool_call>[{"name": "',
    "granite": '<|tool_call|>{"arguments": {"a": "',
    "llama3": '{"name": "f", "parameters": {"a": ',
    "mistral": "[TOOL_CALLS]f",
    "qwen3-coder": "<function=f><parameter=n>",
    "glm": "<tool_call>f<arg_key>n</arg_key><arg_value>",
    "harmony": "<|channel|>commentary to=functions.f",
}
FUNCTIONS = [Function("f", {"properties": {"n": {"type": "integer"}}})]


class Counted(str):
    """A text that counts the characters that are copied or looked at."""

    __slots__ = ()
    work = 0

    def _count(self, result: str) -> Counted:
        Counted.work += len(self) + len(result)
        return Counted(result)

    def __add__(self, other: str) -> Counted:
        return self._count(str.__add__(self, other))

    def __radd__(self, other: str) -> Counted:
        return self._count(str.__add__(other, self))

    def __getitem__(self, key: SupportsIndex | slice[Any, Any, Any]) -> Counted:
        Counted.work += 1
        return Counted(str.__getitem__(self, key))

    def lstrip(self, chars: str | None = None, /) -> Counted:
        return self._count(str.lstrip(self, chars))

    def rstrip(self, chars: str | None = None, /) -> Counted:
        return self._count(str.rstrip(self, chars))

    def find(self, *args: Any) -> int:
        Counted.work += len(self)
        return str.find(self, *args)


def work_of(parser: OutputParser, deltas: Sequence[str]) -> int:
    Counted.work = 0
    for delta in deltas:
        parser.push(Counted(delta))
    parser.finish()
    return Counted.work


@pytest.mark.parametrize("repeated", [" ", "x", "[", '", "', "<"])
@pytest.mark.parametrize("name", BEGINS)
def test_a_text_that_goes_on_is_read_in_proportion_to_its_length(name: str, repeated: str) -> None:
    """Also white space, of which nothing is known until text follows."""
    for reasoning in (None, REASONING_DIALECTS["think"]):
        dialect = Dialect(TOOL_DIALECTS[name], reasoning)
        for begin in ("word", BEGINS[name]):
            works = []
            for num_chars in (NUM_CHARS // 4, NUM_CHARS):
                parser = OutputParser(dialect, FUNCTIONS)
                works.append(work_of(parser, [begin, *repeated * num_chars]))
            assert works[1] < 6 * works[0] + 2000


def test_no_more_than_the_beginning_of_a_mark_waits() -> None:
    feed = Feed()
    reading: Generator[None, None, tuple[str, str | None]] = feed.text_before("<end>", "\n<end>")
    for _ in range(NUM_CHARS):
        feed.push("\n<en")
        next(reading)
        assert feed.num_unread < len("\n<end>")
    feed.push("d>")
    with pytest.raises(StopIteration) as stop:
        next(reading)
    assert stop.value.value == ("\n<en" * (NUM_CHARS - 1), "\n<end>")
