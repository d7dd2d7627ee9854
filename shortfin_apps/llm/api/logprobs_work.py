"""Makes the parts of an answer that have log-probabilities, of which there may be millions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import orjson

from shortfin_apps.llm.components.frontend.text_workers import TextWorkers
from shortfin_apps.llm.components.request.messages import TokenLogprobs
from shortfin_apps.llm.lone_surrogates import json_of

FEW = 1000  # which take some milliseconds

P = ParamSpec("P")
T = TypeVar("T")


def num_logprobs(tokens: Sequence[TokenLogprobs | None]) -> int:
    """Those of the tokens, and of the alternatives to them."""
    return sum(1 + len(each.top) for each in tokens if each is not None)


async def made(
    workers: TextWorkers, count: int, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """What `make` makes of `count` log-probabilities: in a thread if they are many."""
    if count > FEW:
        return await workers.run(count, make, *args, **kwargs)
    await asyncio.sleep(0)  # lets other requests run while many answers are formatted
    return make(*args, **kwargs)


def encoded(value: Any) -> orjson.Fragment:
    """The JSON of a part of an answer, which the whole is joined of without work on the parts."""
    return orjson.Fragment(json_of(value))
