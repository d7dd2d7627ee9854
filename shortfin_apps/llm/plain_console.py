"""Rich's console for text from files, servers and models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from shortfin_apps.llm.visible import visible


class PlainConsole(Console):
    """Prints strings as they are: brackets are no markup, and control characters become visible.

    Output goes to stdout, with `stderr` to stderr; `width` is in columns, by default the terminal's.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """As Console's; before strings are measured, as pictures are wider than control characters."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As Console's; every text that is drawn passes here, and so do the console's own controls."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)
