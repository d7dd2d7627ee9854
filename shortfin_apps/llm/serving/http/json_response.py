"""JSON answers, serialised by orjson; slow parts are made in a worker thread.

Slow are millions of log-probabilities, and long tool calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import orjson
from starlette.responses import Response

from shortfin_apps.llm.components.request.messages import TokenLogprobs
from shortfin_apps.llm.lone_surrogates import json_of
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta
from shortfin_apps.llm.serving.frontend.text_workers import TextWorkers


class JsonResponse(Response):
    """A response serialised by orjson, which is fast and refuses NaN."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_of(content)


FEW = 1000  # this many log-probabilities take a few milliseconds
CHARS_EACH = 10  # characters parsed in the time of one log-probability, at up to 3 us a character

P = ParamSpec("P")
T = TypeVar("T")


def num_logprobs(tokens: Sequence[TokenLogprobs | None]) -> int:
    """Count the log-probabilities of the tokens and their alternatives."""
    return sum(1 + len(each.top) for each in tokens if each is not None)


def work_of(answer: TextDelta) -> int:
    """Return the answer's formatting cost in units of one log-probability."""
    return num_logprobs(answer.logprobs) + len(answer.text) // CHARS_EACH


async def made(
    workers: TextWorkers, count: int, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Return the result of `make`, run in a thread if its cost, `count` log-probabilities, is high."""
    if count > FEW:
        return await workers.run(count, make, *args, **kwargs)
    await asyncio.sleep(0)  # lets other requests run while many answers are formatted
    return make(*args, **kwargs)


def encoded(value: Any) -> orjson.Fragment:
    """Encode a part of an answer, so that encoding the full answer only copies it."""
    return orjson.Fragment(json_of(value))
