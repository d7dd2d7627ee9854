"""A simulated worker: one engine on one device.

Between arrivals and ends, all steps take the same time. Time is therefore counted in steps, and a worker has
a single next event: the end of its prefill or of the decode that ends first.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from bench.simulate_cluster.prefix_store import PrefixStore
from bench.simulate_cluster.workload import Floats

INFINITE = float("inf")
Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Step times in ms by number of decoding requests: decodes only, and with `budget_tokens` of prompts.

    The defaults were measured with the shape of Llama 3.1 8B in bf16 on one H200 (bench/README.md, "NVIDIA
    H200"): the engine's steps decoding ahead, and an extend of 256 tokens with 0 and 64 decodes.
    """

    decode_ms: Points = ((1, 4.84), (8, 5.12), (64, 7.26), (256, 19.5))
    extend_ms: Points = ((0, 11.1), (64, 15.5))
    budget_tokens: int = 256

    def tables(self, most: int) -> tuple[list[float], list[float]]:
        """Return seconds of a step with 0 to `most` decodes, without and with prompts; interpolated linearly.

        Beyond the last point of `extend_ms`, prompts add as much to a decode step as they do there.
        """
        rows = np.arange(most + 1, dtype=float)
        decode = _interpolate(rows, self.decode_ms)
        last, last_ms = self.extend_ms[-1]
        beyond = decode + last_ms - float(_interpolate(np.array([float(last)]), self.decode_ms)[0])
        mixed = np.where(rows <= last, _interpolate(rows, self.extend_ms), beyond)
        return (decode / 1e3).tolist(), (mixed / 1e3).tolist()


@dataclass(slots=True)
class Job:
    """A request; times in seconds. `prompt_tokens` includes the group's prefix."""

    turn: int
    conversation: int
    group: int
    prefix_tokens: int
    prompt_tokens: int
    answer_tokens: int
    arrival_s: float
    worker: int = -1
    hit_tokens: int = 0
    first_token_s: float = INFINITE


@dataclass(slots=True)
class Worker:
    """Prefills prompts in order of arrival, in chunks batched with decodes, like extend-attention.

    Prompts share a step's budget without a gap. A request starts if fewer than `max_running` requests decode
    and its tokens fit into the memory not held by others.
    """

    decode_s: list[float]
    mixed_s: list[float]
    budget_tokens: int
    max_running: int
    cache_tokens: int
    cache: PrefixStore = field(init=False)
    waiting: deque[Job] = field(default_factory=deque)
    _prefill: Job | None = None
    _prefill_end: float = INFINITE  # in steps, like the ends of decodes
    _decodes: list[tuple[float, int, Job]] = field(default_factory=list)
    _step: float = 0
    _now: float = 0

    def __post_init__(self) -> None:
        self.cache = PrefixStore(self.cache_tokens)

    def add(self, job: Job, now: float) -> None:
        self._advance(now)
        self.waiting.append(job)
        self._start()

    def next_event(self) -> float:
        """Return the time of the next event if nothing arrives before."""
        end = self._next_end()
        return INFINITE if end == INFINITE else self._now + (end - self._step) * self._step_s()

    def finish(self, now: float) -> tuple[Job | None, Job | None]:
        """At `next_event`, return the request with a first token and the one that ended; may be the same."""
        self._step, self._now = self._next_end(), now
        started, ended = None, None
        if self._prefill is not None and self._prefill_end <= self._step:
            started = self._prefill
            started.first_token_s = now
            heapq.heappush(self._decodes, (self._step + started.answer_tokens - 1, started.turn, started))
            self._prefill, self._prefill_end = None, INFINITE
        if self._decodes and self._decodes[0][0] <= self._step:
            ended = heapq.heappop(self._decodes)[2]
            self.cache.unpin(ended.group, ended.conversation)
        self._start()
        return started, ended

    @property
    def usage(self) -> float:
        """The share of the KV cache held by running requests."""
        return self.cache.pinned_tokens / self.cache_tokens

    @property
    def num_waiting(self) -> int:
        """Requests that cannot run yet; requests waiting for their share of the budget count as running."""
        running = len(self._decodes) + (self._prefill is not None)
        return max(0, running + len(self.waiting) - self.max_running)

    def _start(self) -> None:
        if self._prefill is not None or not self.waiting or len(self._decodes) >= self.max_running:
            return
        job = self.waiting[0]
        total = job.prompt_tokens + job.answer_tokens
        if self._decodes and self.cache.pinned_tokens + total > self.cache_tokens:
            return
        self.waiting.popleft()
        job.hit_tokens = min(self.cache.held(job.group, job.conversation), job.prompt_tokens - 1)
        own_tokens = total - job.prefix_tokens
        self.cache.put(job.group, job.prefix_tokens, job.conversation, own_tokens, pin=True)
        computed = job.prompt_tokens - job.hit_tokens
        self._prefill, self._prefill_end = job, self._step + computed / self.budget_tokens

    def _next_end(self) -> float:
        return min(self._prefill_end, self._decodes[0][0]) if self._decodes else self._prefill_end

    def _step_s(self) -> float:
        table = self.decode_s if self._prefill is None else self.mixed_s
        return table[len(self._decodes)]

    def _advance(self, now: float) -> None:
        if self._prefill is not None or self._decodes:
            self._step += (now - self._now) / self._step_s()
        self._now = now


def _interpolate(rows: Floats, points: Points) -> Floats:
    return np.interp(rows, [float(row) for row, _ in points], [ms for _, ms in points])
