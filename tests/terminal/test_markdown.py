from __future__ import annotations

from collections.abc import Callable
from io import StringIO

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from shortfin_apps.llm.terminal.markdown import FRAME_S, AnswerMarkdown, OpenText, StreamedMarkdown
from tests.terminal.screen import screen_text

Draw = Callable[[], None]
PIECES = (
    *("a", "b c", "word word word ", "# ", "## ", "\n", "\n\n", "- ", "+ ", "1. ", "2) ", "> ", "\t", "    "),
    *(
        "```",
        "```py\n",
        "~~~",
        "---",
        "===",
        "| ",
        "|---|---|\n",
        "*",
        "**",
        "`",
        "~~",
        "\\",
        "&amp;",
        "\r\n",
    ),
    *("[x](http://y)", "![i](j)", "[f]", "[f]: /u\n", "<div>", "<b>", "\r", "\x1b[2J", "\x07"),
)
TEXTS = st.lists(st.sampled_from(PIECES), max_size=25).map("".join)
ANSWER = """\
# Title

Some *text*
- one
- two

  ```py
  x = 1
  ```

| a | b |
|---|---|
| 1 | 2 |
---
the end"""


class Frames:
    """The timer of an event loop that stands still."""

    def __init__(self) -> None:
        self.waiting: list[Draw] = []
        self.pauses_s: list[float] = []

    def later(self, pause_s: float, draw: Draw) -> Frames:
        self.pauses_s.append(pause_s)
        self.waiting.append(draw)
        return self

    def cancel(self) -> None:
        self.waiting.clear()

    def draw(self) -> None:
        waiting, self.waiting = self.waiting, []
        for draw in waiting:
            draw()


def console(width: int, height: int, **environment: str) -> Console:
    return Console(
        file=StringIO(),
        width=width,
        height=height,
        force_terminal=True,
        _environ=environment or {"TERM": "xterm"},
    )


def written(to: Console) -> str:
    assert isinstance(to.file, StringIO)
    return to.file.getvalue()


def at_once(text: str, width: int, height: int) -> list[str]:
    whole = OpenText()
    whole.add(text.replace("\r", "") + "\n")  # as `visible` does
    on = console(width, height)
    on.print(AnswerMarkdown(whole.rest.replace("\x1b", "\u241b").replace("\x07", "\u2407")))
    return screen_text(written(on), width, height)


def streamed(text: str, cuts: list[tuple[int, bool]], width: int, height: int) -> list[str]:
    """Each cut has a number of characters, and whether they are drawn before the next ones come."""
    on, frames = console(width, height), Frames()
    writer = StreamedMarkdown(on, frames.later)
    start = 0
    for length, is_drawn in [*cuts, (len(text), False)]:
        if start < len(text):
            writer.write(text[start : start + length])
        start += length
        if is_drawn:
            frames.draw()
    writer.finish()
    frames.draw()  # a late timer has no effect
    return screen_text(written(on), width, height)


@given(
    TEXTS,
    st.lists(st.tuples(st.integers(1, 6), st.booleans())),
    st.sampled_from((8, 20, 60)),
    st.sampled_from((3, 6, 24)),
)
@example(ANSWER, [(1, True)] * len(ANSWER), 20, 6)
@example("- x\n---a", [(1, True)] * 8, 20, 6)  # a rule, until the last character
def test_however_a_text_is_cut_the_screen_is_that_of_the_whole(
    text: str, cuts: list[tuple[int, bool]], width: int, height: int
) -> None:
    assert streamed(text, cuts, width, height) == at_once(text, width, height)


@given(TEXTS, st.data())
def test_a_block_that_is_closed_stays_as_it_is(text: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))
    both, first = OpenText(), OpenText()
    both.add(text)
    first.add(text[:cut])
    blocks = first.closed()
    first.add(text[cut:])
    assert [*blocks, *first.closed(), first.rest] == [*both.closed(), both.rest]


def test_what_was_printed_is_not_drawn_again() -> None:
    on, frames = console(40, 10), Frames()
    writer = StreamedMarkdown(on, frames.later)
    writer.write("The first paragraph.\n\nThe second")
    frames.draw()
    writer.write(" paragraph.")
    frames.draw()
    writer.finish()
    assert written(on).count("The first paragraph.") == 1
    assert written(on).count("The second") == 3


def test_of_a_block_higher_than_the_terminal_the_end_is_live() -> None:
    on, frames = console(20, 5), Frames()
    writer = StreamedMarkdown(on, frames.later)
    writer.write("```\n" + "".join(f"line {n}\n" for n in range(50)))
    frames.draw()
    assert [line.strip() for line in screen_text(written(on), 20, 5)] == ["line 47", "line 48", "line 49"]
    writer.finish()
    assert [line.strip() for line in screen_text(written(on), 20, 5) if line] == [
        f"line {n}" for n in range(50)
    ]


def test_frames_wait_for_text_and_for_each_other() -> None:
    frames = Frames()
    times = iter((0.0, 1.0, 2.0, 2.0))
    writer = StreamedMarkdown(console(20, 5), frames.later, clock=times.__next__)
    writer.write("a")
    writer.write("b")
    assert frames.pauses_s == [FRAME_S]
    frames.draw()  # takes a second
    writer.write("c")
    assert frames.pauses_s == [FRAME_S, pytest.approx(5.0)]
    writer.finish()


def test_html_and_addresses_are_shown() -> None:
    shown = "\n".join(streamed("<div>\n\n[here](http://x.org)", [], 60, 24))
    assert "<div>" in shown
    assert "here (http://x.org)" in shown


def test_the_cursor_is_there_again_at_the_end() -> None:
    on, frames = console(20, 5), Frames()
    writer = StreamedMarkdown(on, frames.later)
    writer.write("a")
    frames.draw()
    writer.finish()
    assert written(on).rindex("\x1b[?25h") > written(on).rindex("\x1b[?25l")


def test_no_color_is_honoured() -> None:
    texts = {}
    for environment in ({"TERM": "xterm-256color"}, {"TERM": "xterm-256color", "NO_COLOR": "1"}):
        on = console(40, 10, **environment)
        writer = StreamedMarkdown(on, Frames().later)
        writer.write("`code`\n```py\nx = 1\n```")
        writer.finish()
        texts["NO_COLOR" in environment] = written(on)
    assert "\x1b[34" in texts[False] or ";36" in texts[False]
    assert not any(f"{prefix}3{colour}" in texts[True] for prefix in ("\x1b[", ";") for colour in range(8))
