"""Prints a streamed answer as it arrives, and measures its tokens and times."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable

from shortfin_apps.llm.client import Chunk, Usage

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class StreamedAnswer:
    """A streamed answer, printed to stdout. `text` has the text that was printed, even if the stream fails.

    On a terminal, the model's reasoning is printed before it, dimly; elsewhere it is left out.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._pieces: list[str] = []
        self._reasons = False  # what was printed last is reasoning
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.ttft_s: float | None = None
        self.total_s = 0.0

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    async def show(self, chunks: AsyncIterator[Chunk]) -> None:
        """Prints and flushes each piece of text, and ends the last line, even if the stream fails."""
        started = self._clock()
        try:
            async for chunk in chunks:
                self._take(chunk, self._clock() - started)
        finally:
            self._end_reasoning()
            self.total_s = self._clock() - started
            if not self.text.endswith("\n"):
                print(flush=True)

    def _take(self, chunk: Chunk, since_start_s: float) -> None:
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.usage = chunk.usage or self.usage
        if (chunk.text or chunk.reasoning) and self.ttft_s is None:
            self.ttft_s = since_start_s
        if chunk.reasoning and sys.stdout.isatty():
            self._reasons = True
            self._write(f"{DIM}{chunk.reasoning}{PLAIN}")
        if chunk.text:
            self._end_reasoning()
            self._pieces.append(chunk.text)
            self._write(chunk.text)

    def _end_reasoning(self) -> None:
        if self._reasons:
            self._reasons = False
            self._write("\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def summary(self) -> str:
        """Token counts and times, as one line of text."""
        parts = [f"{self.total_s:.2f} s", *self._token_counts()]
        if self.ttft_s is not None:
            parts.append(f"first text after {self.ttft_s * 1e3:.0f} ms")
        if (rate := self._tokens_per_s()) is not None:
            parts.append(f"then {rate:.1f} tokens/s")
        if self.finish_reason is not None:
            parts.append(f"ended by {self.finish_reason}")
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
