"""A Rich console for text from files, servers and models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from shortfin_apps.llm.visible import visible


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
