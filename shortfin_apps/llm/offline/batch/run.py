"""Runs a batch: sends the lines that have no result yet, and writes each result as it comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from shortfin_apps.llm.client.errors import error_from_response
from shortfin_apps.llm.offline.batch.output import BatchOutput
from shortfin_apps.llm.offline.batch.requests import BatchInput, BatchRequest
from shortfin_apps.llm.offline.batch.results import Result, result_of
from shortfin_apps.llm.offline.local_model import Answered
from shortfin_apps.llm.offline.progress import Told
from shortfin_apps.llm.offline.together import together

# Answers that are none to the line itself: any other would get the same now, and this one another later.
NOT_NOW = (401, 403, 429, 502, 503, 504)


class Sender(Protocol):
    """Where requests are answered."""

    async def send(self, request: BatchRequest) -> Answered:
        """The answer, with whatever status. Raises LlmError when none can be had, for this line or others."""
        ...


@dataclass(slots=True)
class Tally:
    """Counts of a batch: of lines with earlier runs, of tokens without."""

    num_lines: int
    num_before: int  # finished by earlier runs
    num_done: int
    num_failed: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    took_s: float = 0.0

    def add(self, result: Result) -> None:
        self.num_done += 1
        self.num_failed += not result.finished.is_ok
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.cached_tokens
        self.completion_tokens += result.completion_tokens


def tally_of(batch: BatchInput, output: BatchOutput) -> Tally:
    """That of a run which is to begin."""
    num_before = len(output.finished)
    num_failed = sum(not is_ok for is_ok in output.finished.values())
    return Tally(len(batch.lines), num_before, num_before, num_failed)


async def run_batch(
    batch: BatchInput, output: BatchOutput, sender: Sender, concurrency: int, tally: Tally, told: Told
) -> None:
    """Returns when every line has its result, and all of them are on the disk.

    At most `concurrency` lines are with the sender at once. Raises LlmError when it cannot go on; what was
    answered by then is written, and another run goes on from there.
    """
    waiting = (line for line in batch.lines if line.custom_id not in output.finished)

    async def work() -> None:
        for line in waiting:
            request = batch.request(line)
            answered = await sender.send(request)
            _check_is_for_line(answered)
            result = result_of(request.custom_id, answered)
            await output.write(result)
            tally.add(result)
            told(result.completion_tokens)

    async with _synced(output):
        await together(work, min(concurrency, len(batch.lines) - len(output.finished)))


def _check_is_for_line(answered: Answered) -> None:
    """Raises LlmError for an answer that says nothing about the line."""
    if answered.status in NOT_NOW:
        raise error_from_response(answered.status, answered.body, None)


@asynccontextmanager
async def _synced(output: BatchOutput) -> AsyncIterator[None]:
    """Context in which what is written is soon on the disk; at its end, all of it is."""
    syncing = asyncio.ensure_future(output.sync_often())
    try:
        yield
    finally:
        syncing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await syncing
        await output.sync()
