"""A thread that steps an engine and passes each step's tokens to the event loop in one call."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Engine(Protocol):
    """An engine that forms its own batches. Only one thread calls it."""

    @property
    def quiet_s(self) -> float:
        """Time without arrivals before an idle engine starts; 0 if requests can join a batch."""
        ...

    def add(self, key: int, prompt_token_ids: Sequence[int], max_tokens: int) -> None:
        """Queue a request of exactly `max_tokens` greedy tokens, without stopping early."""
        ...

    def step(self) -> list[tuple[int, int]]:
        """Compute one step; return new tokens as (key, token id), in order."""
        ...

    def is_busy(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Generation:
    """A request: `token_ids` receives its token ids, or the engine's exception if it fails."""

    prompt_token_ids: Sequence[int]
    max_tokens: int
    token_ids: asyncio.Queue[int | Exception] = field(default_factory=asyncio.Queue)


WARM_UP_PROMPT_TOKENS = (16, 128, 512)
WARM_UP_TOKENS = 8


def warm_up(engine: Engine) -> None:
    """Run requests of several lengths, one by one and together.

    Engines compile kernels for a shape when they first meet it; the other servers do so before they are
    ready.
    """
    keys = itertools.count()
    for lengths in (*((length,) for length in WARM_UP_PROMPT_TOKENS), WARM_UP_PROMPT_TOKENS):
        for length in lengths:
            engine.add(next(keys), [length] * length, WARM_UP_TOKENS)
        while engine.is_busy():
            engine.step()


class EngineThread:
    """Owns the engine. Call `submit` in the event loop in which `start` was called."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Generation] = queue.SimpleQueue()
        self._running: dict[int, Generation] = {}
        self._keys = itertools.count()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit(self, generation: Generation) -> None:
        self._inbox.put(generation)

    def _run(self) -> None:
        try:
            while True:
                self._admit()
                self._step()
        except Exception as error:
            logging.exception("the engine failed")
            self._fail(list(self._running.values()), error)
            while True:  # fail later requests, which would otherwise wait forever
                self._fail([self._inbox.get()], error)

    def _step(self) -> None:
        tokens = [(self._running[key].token_ids, token_id) for key, token_id in self._engine.step()]
        self._loop.call_soon_threadsafe(_deliver, tokens)

    def _fail(self, generations: Sequence[Generation], error: Exception) -> None:
        failures = [(generation.token_ids, error) for generation in generations]
        self._loop.call_soon_threadsafe(_deliver, failures)

    def _admit(self) -> None:
        """Add all requests that have arrived; wait for one if the engine has none."""
        if not self._engine.is_busy():
            self._running.clear()
            self._add(self._inbox.get())
            while self._engine.quiet_s and self._add_within(self._engine.quiet_s):
                pass
        while self._add_within(0):
            pass

    def _add_within(self, seconds: float) -> bool:
        try:
            generation = self._inbox.get(block=seconds > 0, timeout=seconds or None)
        except queue.Empty:
            return False
        self._add(generation)
        return True

    def _add(self, generation: Generation) -> None:
        key = next(self._keys)
        self._running[key] = generation
        self._engine.add(key, generation.prompt_token_ids, generation.max_tokens)


def _deliver(items: Sequence[tuple[asyncio.Queue[int | Exception], int | Exception]]) -> None:
    for token_ids, item in items:
        token_ids.put_nowait(item)
