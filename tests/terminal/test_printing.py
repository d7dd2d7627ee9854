from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from shortfin_apps.llm.client import Chunk, ServerError, Usage
from shortfin_apps.llm.terminal.printing import StreamedAnswer


def ticking() -> Iterator[float]:
    yield from (n * 0.5 for n in range(100))


async def stream(*chunks: Chunk) -> AsyncIterator[Chunk]:
    for chunk in chunks:
        yield chunk


async def test_text_is_printed_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    answer = StreamedAnswer(clock=ticking().__next__)
    await answer.show(stream(Chunk("The "), Chunk("end", "stop"), Chunk("", usage=Usage(5, 3, 2))))
    assert capsys.readouterr().out == "The end\n"
    assert answer.text == "The end"
    assert answer.summary() == (
        "2.00 s, 5 tokens in (2 cached), 3 out, first text after 500 ms, then 1.3 tokens/s, ended by stop"
    )


async def test_figures_fit_in_a_line_below_the_answer() -> None:
    answer = StreamedAnswer(clock=ticking().__next__)
    assert answer.figures() == ""
    await answer.show(stream(Chunk("The "), Chunk("end", "length"), Chunk("", usage=Usage(5, 3, 2))))
    assert answer.figures() == (
        "3 tokens, 1.3 tokens/s, TTFT 500 ms, 2 of 5 prompt tokens cached, cut at its longest"
    )


async def test_a_final_newline_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    await StreamedAnswer().show(stream(Chunk("a\n")))
    assert capsys.readouterr().out == "a\n"


async def test_text_before_a_failure_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    async def failing() -> AsyncIterator[Chunk]:
        yield Chunk("The ")
        raise ServerError("device lost")

    answer = StreamedAnswer(clock=ticking().__next__)
    with pytest.raises(ServerError):
        await answer.show(failing())
    assert answer.text == "The "
    assert capsys.readouterr().out == "The \n"
    assert answer.summary() == "1.00 s, first text after 500 ms"


async def test_a_single_token_has_no_rate() -> None:
    answer = StreamedAnswer(clock=ticking().__next__)
    await answer.show(stream(Chunk("a", "length", Usage(5, 1))))
    assert "tokens/s" not in answer.summary()


@pytest.mark.parametrize(
    ("is_terminal", "printed"), [(True, "\x1b[2mhm\x1b[0m\x1b[2m.\x1b[0m\nThe end\n"), (False, "The end\n")]
)
async def test_reasoning_is_printed_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool, printed: str
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    answer = StreamedAnswer(clock=ticking().__next__)
    await answer.show(
        stream(Chunk("", reasoning="hm"), Chunk("", reasoning="."), Chunk("The "), Chunk("end"))
    )
    assert capsys.readouterr().out == printed
    assert (answer.text, answer.ttft_s) == ("The end", 0.5)


async def test_control_characters_are_shown_on_a_terminal_and_kept_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await StreamedAnswer().show(stream(Chunk("a\x1b[2J")))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    await StreamedAnswer().show(stream(Chunk("a\x1b[2J", reasoning="\x07")))
    assert capsys.readouterr().out == "a\x1b[2J\n\x1b[2m␇\x1b[0m\na␛[2J\n"


async def test_a_lone_surrogate_is_printed_and_kept_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    answer = StreamedAnswer()
    await answer.show(stream(Chunk("a\ud800b")))
    assert capsys.readouterr().out == "a\ufffdb\n"
    assert answer.text == "a\ufffdb"


async def test_reasoning_within_an_answer_has_lines_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    await StreamedAnswer().show(stream(Chunk("One"), Chunk("", reasoning="hm"), Chunk("Two")))
    assert capsys.readouterr().out == "One\n\x1b[2mhm\x1b[0m\nTwo\n"
