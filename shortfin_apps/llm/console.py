"""Prints text from files, servers and models without letting it control the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_KEPT = "\n\t"
_REPLACEMENT = 0xFFFD
# From U+2400 on there is a picture of each character below U+0020, but of none of U+0080 to U+009F.
_SHOWN: dict[int, int | None] = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in _KEPT},
    ord("\r"): None,  # dropped: part of a line end, or it would let the following text overwrite the line
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), _REPLACEMENT),
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), _REPLACEMENT),  # bidi: reorder the line
    **dict.fromkeys(range(0xD800, 0xE000), _REPLACEMENT),  # lone surrogates, which no stream can encode
}


def visible(text: str) -> str:
    """Replace control characters by Unicode's pictures of them, except line feeds and tabs.

    Each character is replaced independently of the others, so a text may be converted in pieces.
    """
    return text.translate(_SHOWN)


class PlainConsole(Console):
    """A Rich console that prints strings literally: brackets are not markup, control characters are visible.

    Output goes to stdout, or to stderr if `stderr` is set. `width` is in columns, by default the terminal's.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a string, made visible first: Rich measures the result, and pictures have another width."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render anything, and apply `visible` to all its text, but not to Rich's own control codes."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)
