"""Prints a streamed answer as it arrives, and measures token counts and times."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from shortfin_apps.llm.client import Chunk, Usage
from shortfin_apps.llm.console import visible
from shortfin_apps.llm.lone_surrogates import encodable

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Writer(Protocol):
    """Receives the text of an answer."""

    def write(self, text: str) -> None: ...

    def finish(self) -> None:
        """End the last line. Callers must not write afterwards."""
        ...


class PlainText:
    """Writes text to stdout. On a terminal, control characters are replaced by visible symbols."""

    def __init__(self) -> None:
        self._shown = visible if sys.stdout.isatty() else str
        self._at_start = False  # whether the output is at the start of a line

    def write(self, text: str) -> None:
        self._at_start = text.endswith("\n")
        _print(self._shown(text))

    def finish(self) -> None:
        if not self._at_start:
            _print("\n")


class StreamedAnswer:
    """Prints a streamed answer to stdout. `text` is the text printed so far, even if the stream fails.

    On a terminal, the model's reasoning is printed too, dimmed; elsewhere it is omitted. `writer` must create
    a writer for each passage of text.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, writer: Callable[[], Writer] = PlainText
    ) -> None:
        self._clock = clock
        self._make_writer = writer
        self._writer: Writer | None = None
        self._pieces: list[str] = []
        self._reasons = False  # whether the last printed piece is reasoning
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.ttft_s: float | None = None
        self.total_s = 0.0

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    async def show(self, chunks: AsyncIterator[Chunk]) -> None:
        """Print each chunk as it arrives. A line that was begun is ended even if the stream fails."""
        started = self._clock()
        try:
            async for chunk in chunks:
                self._take(chunk, self._clock() - started)
            self._end_reasoning()
            if not self._pieces:
                _print("\n")
        finally:
            self._end_reasoning()
            self.total_s = self._clock() - started
            self._end_text()

    def _take(self, chunk: Chunk, since_start_s: float) -> None:
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.usage = chunk.usage or self.usage
        if (chunk.text or chunk.reasoning) and self.ttft_s is None:
            self.ttft_s = since_start_s
        if chunk.reasoning and sys.stdout.isatty():
            self._end_text()
            self._reasons = True
            _print(f"{DIM}{visible(chunk.reasoning)}{PLAIN}")
        if chunk.text:
            self._end_reasoning()
            text = encodable(chunk.text)
            self._pieces.append(text)
            if self._writer is None:
                self._writer = self._make_writer()
            self._writer.write(text)

    def _end_reasoning(self) -> None:
        if self._reasons:
            self._reasons = False
            _print("\n")

    def _end_text(self) -> None:
        if self._writer is not None:
            self._writer.finish()
            self._writer = None

    def summary(self) -> str:
        """Return one line with token counts, times and the finish reason, as far as known."""
        parts = [f"{self.total_s:.2f} s", *self._token_counts()]
        if self.ttft_s is not None:
            parts.append(f"first text after {self.ttft_s * 1e3:.0f} ms")
        if (rate := self._tokens_per_s()) is not None:
            parts.append(f"then {rate:.1f} tokens/s")
        if self.finish_reason is not None:
            parts.append(f"ended by {self.finish_reason}")
        return ", ".join(parts)

    def figures(self) -> str:
        """Return one line to show below an answer: tokens, tokens/s, TTFT, cached tokens, as far as known."""
        parts = []
        if self.usage is not None:
            parts.append(f"{self.usage.completion_tokens} tokens")
        if (rate := self._tokens_per_s()) is not None:
            parts.append(f"{rate:.1f} tokens/s")
        if self.ttft_s is not None:
            parts.append(f"TTFT {self.ttft_s * 1e3:.0f} ms")
        if self.usage is not None:
            parts.append(f"{self.usage.cached_tokens} of {self.usage.prompt_tokens} prompt tokens cached")
        if self.finish_reason == "length":
            parts.append("cut at its longest")
        return ", ".join(parts)

    def _token_counts(self) -> list[str]:
        if self.usage is None:
            return []
        cached = f" ({self.usage.cached_tokens} cached)" if self.usage.cached_tokens else ""
        return [f"{self.usage.prompt_tokens} tokens in{cached}", f"{self.usage.completion_tokens} out"]

    def _tokens_per_s(self) -> float | None:
        if self.usage is None or self.ttft_s is None or self.usage.completion_tokens < 2:
            return None
        if self.total_s <= self.ttft_s:
            return None
        return (self.usage.completion_tokens - 1) / (self.total_s - self.ttft_s)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
