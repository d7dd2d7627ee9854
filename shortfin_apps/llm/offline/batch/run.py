"""Runs a batch: sends lines to a model or a server, and writes each result when it arrives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from shortfin_apps.llm.client.errors import error_from_response
from shortfin_apps.llm.client.sending import together
from shortfin_apps.llm.contract.errors import UnavailableError
from shortfin_apps.llm.offline.batch.output import BatchOutput, Result, result_of
from shortfin_apps.llm.offline.batch.requests import BatchInput, BatchRequest
from shortfin_apps.llm.offline.local_model import Answered, LocalModel
from shortfin_apps.llm.offline.progress import OnAnswer

SERVER_FAILED = 500


class LocalSender:
    """Sends requests to a model in this process."""

    def __init__(self, model: LocalModel) -> None:
        self._model = model

    async def send(self, request: BatchRequest) -> Answered:
        """Send a request. Raises UnavailableError if the device has failed, as all other lines would fail."""
        answered = await self._model.post(request.url, request.body, request.num_sequences)
        if answered.status >= SERVER_FAILED and not self._model.healthy:
            raise UnavailableError(
                "the device does not work any more; see the messages above, and run it again"
            )
        return answered


# Statuses that the line itself does not cause: other lines would get the same one, and a retry may succeed.
NOT_NOW = (401, 403, 429, 502, 503, 504)


class Sender(Protocol):
    """Sends requests to a model in this process or to a server."""

    async def send(self, request: BatchRequest) -> Answered:
        """Return the answer, with any status. Raises LlmError if there is no answer, which ends the batch."""
        ...


@dataclass(slots=True)
class Tally:
    """Counts of a batch. Counts of lines include earlier runs; counts of tokens are of this run only."""

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
    """Return the tally at the start of a run, with the lines that earlier runs have finished."""
    num_before = len(output.finished)
    num_failed = sum(not is_ok for is_ok in output.finished.values())
    return Tally(len(batch.lines), num_before, num_before, num_failed)


async def run_batch(
    batch: BatchInput,
    output: BatchOutput,
    sender: Sender,
    concurrency: int,
    tally: Tally,
    on_answer: OnAnswer,
) -> None:
    """Send all remaining lines, at most `concurrency` at once; return once all results are on disk.

    Raises LlmError if the batch cannot continue. Earlier results are then on disk, and another run resumes
    the batch.
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
            on_answer(result.completion_tokens)

    async with _synced(output):
        await together(work, min(concurrency, len(batch.lines) - len(output.finished)))


def _check_is_for_line(answered: Answered) -> None:
    """Raise LlmError for an answer with a status that the line itself did not cause (NOT_NOW)."""
    if answered.status in NOT_NOW:
        raise error_from_response(answered.status, answered.body, None)


@asynccontextmanager
async def _synced(output: BatchOutput) -> AsyncIterator[None]:
    """Sync the output to disk regularly during the context, and once more when the context ends."""
    syncing = asyncio.ensure_future(output.sync_often())
    try:
        yield
    finally:
        syncing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await syncing
        await output.sync()
