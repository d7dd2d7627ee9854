"""Makes the parts of an answer that take long: millions of log-probabilities, and long calls of tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import orjson

from shortfin_apps.llm.components.frontend.text_stream import TextDelta
from shortfin_apps.llm.components.frontend.text_workers import TextWorkers
from shortfin_apps.llm.components.request.messages import TokenLogprobs
from shortfin_apps.llm.lone_surrogates import json_of

FEW = 1000  # which take some milliseconds
CHARS_EACH = 10  # of a text, to be parsed in the time of a log-probability: up to 3 us a character

P = ParamSpec("P")
T = TypeVar("T")


def num_logprobs(tokens: Sequence[TokenLogprobs | None]) -> int:
    """Those of the tokens, and of the alternatives to them."""
    return sum(1 + len(each.top) for each in tokens if each is not None)


def work_of(answer: TextDelta) -> int:
    """The log-probabilities that take as long as the answer, with those that it has."""
    return num_logprobs(answer.logprobs) + len(answer.text) // CHARS_EACH


async def made(
    workers: TextWorkers, count: int, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """What `make` makes of `count` log-probabilities, or as much work: in a thread if they are many."""
    if count > FEW:
        return await workers.run(count, make, *args, **kwargs)
    await asyncio.sleep(0)  # lets other requests run while many answers are formatted
    return make(*args, **kwargs)


def encoded(value: Any) -> orjson.Fragment:
    """The JSON of a part of an answer, which the whole is joined of without work on the parts."""
    return orjson.Fragment(json_of(value))
