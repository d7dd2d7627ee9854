"""Drafters: models or layers that draft tokens in rounds, which the main model verifies (speculation.py).

A round is one invocation for all requests that get drafts: it computes one token of each. The next one is
sampled with the request's own random numbers. A drafter never ends a request. If it cannot draft for a
request, the request is decoded without drafts. If an invocation fails, no request gets drafts in this step;
after MAX_FAILURES consecutive failures, the drafter stays off. If the step's own invocation was queued
already, it fails, too: the engine computes it again (DraftError).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import ClassVar

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.launch import DrawLaunch, Launch
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.request.request import Request, State
from shortfin_apps.llm.components.speculation.acceptance import Rate
from shortfin_apps.llm.contract.errors import DeviceLostError

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # consecutive
PRIOR = 0.8  # acceptance rate before any observation

Queued = Launch | DrawLaunch


class DraftError(Exception):
    """An invocation of a drafter failed, and so did the one that was queued after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """Options of a drafter.

    `max_tokens`: maximum drafted tokens per request and step. `max_seq_len`: the drafter's context length.
    `round_cost`: cost of a round, relative to reading the main model's weights once (acceptance.py).
    """

    max_tokens: int
    max_seq_len: int
    round_cost: float


class Drafter(ABC):
    """Drafts tokens for an engine's requests, on the engine's thread, with invocations of `runner`.

    `cache` leases the pages that these write. Invocations may be queued, so that the device reads the tokens
    that they draw before the host does.
    """

    NAME: ClassVar[str]  # for log lines

    def __init__(self, runner: BatchRunner, cache: KVCache, options: DraftOptions) -> None:
        self._runner = runner
        self._cache = cache
        self._options = options
        self._rates: dict[Request, Rate] = {}
        self._rate = Rate(PRIOR)  # over all requests; initial rate of new ones
        self._failures = 0  # consecutive
        self._queued: list[Queued] = []  # of the last draft, until the host knows its tokens
        self.device_s = 0.0  # total seconds spent in the drafter's invocations

    @property
    def round_cost(self) -> float:
        return self._options.round_cost

    @property
    def has_given_up(self) -> bool:
        """Whether the drafter stays off after too many consecutive failures."""
        return self._failures >= MAX_FAILURES

    def num_worth(self, request: Request, least: float, most: int) -> int:
        """Return how many tokens to draft: at most `most`, each accepted with a probability above `least`."""
        left = self._options.max_seq_len - len(request.token_ids)
        most = 0 if self.has_given_up else min(most, left, self._options.max_tokens)
        if most <= 0:
            return 0
        rate = self._rates.get(request, self._rate)
        count = rate.num_worth(least, most)
        if not count:
            rate.pass_over()
        return count

    def draft(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        """Draft up to the `wanted` number of tokens for each request; requests without drafts are omitted.

        Callers must have reserved pages of the main model for the wanted tokens. Tokens that the device has
        yet to draw are represented as in an LlmTaskInput; `learn` waits for them.
        """
        self.forget_ended()
        for request in wanted:
            self._rates.setdefault(request, Rate(PRIOR, self._rate.value))
        try:
            with self._counting_time():
                self._runner.clear_suspects(self._cache)
                drafted = self._rounds(wanted)
        except Exception as error:  # the runtimes have no common exception
            queued, self._queued = self._queued, []
            self._give_up(queued, waits=not isinstance(error, DeviceLostError))
            self._count_failure(error)
            return {}
        return drafted

    def learn(self, proposed: Mapping[Request, Sequence[LlmTaskInput]]) -> None:
        """Put the drafted tokens into their tasks, if `draft` has not waited for them.

        Tokens after a row that is not finite are given up. Raises DraftError if an invocation of the draft
        failed, DeviceLostError if the device is lost.
        """
        queued, self._queued = self._queued, []
        drafted = self._waited_for(queued) if queued else {}
        for request, tasks in proposed.items():
            finite = list(takewhile(lambda token_id: token_id >= 0, drafted.get(request, ())))
            for task, token_id in zip_longest(tasks, finite[: len(tasks)]):
                if task.is_unknown:  # a step that is abandoned may learn a second time
                    task.learn(token_id)

    def _waited_for(self, queued: Sequence[Queued]) -> Mapping[Request, Sequence[int]]:
        try:
            with self._counting_time():
                drafted = self._drawn(queued)
        except Exception as error:
            self._give_up(queued, waits=not isinstance(error, DeviceLostError))
            self._count_failure(error)
            if isinstance(error, DeviceLostError):
                raise
            raise DraftError(f"an invocation of the {self.NAME} failed") from error
        self._failures = 0
        return drafted

    def draft_ahead(self, wanted: Mapping[Request, int], checked: Mapping[Request, int]) -> None:  # noqa: B027
        """Draft for the step after the batch in flight, before its tokens are known, if the drafter can.

        The device must draw all tokens of the batch, which has `checked` proposed tokens of each request.
        Callers must have reserved pages of the main model for these, one token more, and the wanted ones.
        """

    def settle(self) -> None:  # noqa: B027
        """Wait for drafts made ahead, and drop them, if they have become useless or pages must be zeroed.

        Callers must have committed the batch that was in flight when they called `draft_ahead`.
        """

    def abandon(self, *, waits: bool = True) -> None:  # noqa: B027
        """Drop drafts made ahead; with `waits`, wait for their invocations."""

    def observe(self, request: Request, num_proposed: int, num_accepted: int) -> None:
        """Record how many of the first `num_proposed` tokens of the request's last draft were accepted."""
        self._rate.observe(num_proposed, num_accepted)
        if (rate := self._rates.get(request)) is not None:
            rate.observe(num_proposed, num_accepted)

    def forget_ended(self) -> None:
        """Forget requests that no longer run."""
        for request in [r for r in self._rates if r.state is not State.RUNNING]:
            del self._rates[request]

    @abstractmethod
    def flush_cache(self) -> None:
        """Free all pages of the drafter that are cached for prefix sharing but not leased."""

    @contextmanager
    def _counting_time(self) -> Iterator[None]:
        """Count the time of the runner's invocations in the `with` block as the drafter's."""
        began_s = self._runner.device_s
        try:
            yield
        finally:
            self.device_s += self._runner.device_s - began_s

    def _count_failure(self, error: Exception) -> None:
        self._failures = MAX_FAILURES if isinstance(error, DeviceLostError) else self._failures + 1
        self._fail()
        left = "it is not used any more" if self.has_given_up else "requests go on without drafts"
        logger.error("an invocation of the %s failed, %s: %s", self.NAME, left, error, exc_info=error)

    def _give_up(self, queued: Sequence[Queued], *, waits: bool) -> None:
        """Give up invocations of a draft that nobody needs any more, or that cannot be completed."""
        for launch in queued:
            self._runner.abandon(launch, waits=waits)

    @abstractmethod
    def _rounds(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        """Draft tokens, round by round, or add invocations that will to `_queued`.

        Raises what a failed invocation raises.
        """

    @abstractmethod
    def _drawn(self, queued: Sequence[Queued]) -> Mapping[Request, Sequence[int]]:
        """Wait for these invocations, and return each request's tokens; -1 for a row that is not finite."""

    @abstractmethod
    def _fail(self) -> None:
        """Forget what a failed invocation may have damaged."""
