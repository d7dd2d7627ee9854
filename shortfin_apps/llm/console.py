"""Shows text from files, servers and models safely in a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_KEPT = "\n\t"
_REPLACEMENT = 0xFFFD
# U+2400 and following are pictures of the characters below U+0020; characters from U+0080 have none.
_SHOWN: dict[int, int | None] = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in _KEPT},
    ord("\r"): None,  # part of a line end; otherwise the following text would overwrite the line
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), _REPLACEMENT),
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), _REPLACEMENT),  # they reorder the line
    **dict.fromkeys(range(0xD800, 0xE000), _REPLACEMENT),  # lone surrogates, which no stream can encode
}


def visible(text: str) -> str:
    """Returns the text with pictures instead of control characters; keeps line feeds and tabs.

    Each character is replaced separately, so pieces of a text may be shown one by one.
    """
    return text.translate(_SHOWN)


class PlainConsole(Console):
    """Prints strings literally: brackets are not markup, and control characters become visible.

    Output goes to stdout, or with `stderr` to stderr; `width` is in columns, by default the terminal's.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Like Console's; applied before measuring, because pictures are wider than control characters."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Like Console's; all drawn text passes through here, as do the console's own control codes."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)
