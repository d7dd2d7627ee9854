"""A thread that steps an engine, and hands the tokens of each step to the event loop in one call."""

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
    """An engine with batches of its own. Only one thread calls it."""

    @property
    def quiet_s(self) -> float:
        """How long no request may arrive before an idle engine starts; 0 where one can join a batch."""
        ...

    def add(self, key: int, prompt_token_ids: Sequence[int], max_tokens: int) -> None:
        """Queues a request of exactly `max_tokens` greedy tokens, whatever they are."""
        ...

    def step(self) -> list[tuple[int, int]]:
        """Computes once: the new tokens as keys and token ids, in order."""
        ...

    def is_busy(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Generation:
    """A request: its token ids arrive in `token_ids`, and a failure of the engine as its exception."""

    prompt_token_ids: Sequence[int]
    max_tokens: int
    token_ids: asyncio.Queue[int | Exception] = field(default_factory=asyncio.Queue)


WARM_UP_PROMPT_TOKENS = (16, 128, 512)
WARM_UP_TOKENS = 8


def warm_up(engine: Engine) -> None:
    """Runs requests of several lengths, one by one and together, as engines compile kernels when they meet a
    shape for the first time; the other servers do so before they are ready."""
    keys = itertools.count()
    for lengths in (*((length,) for length in WARM_UP_PROMPT_TOKENS), WARM_UP_PROMPT_TOKENS):
        for length in lengths:
            engine.add(next(keys), [length] * length, WARM_UP_TOKENS)
        while engine.is_busy():
            engine.step()


class EngineThread:
    """Owns the engine. `submit` belongs to the event loop that `start` was called in."""

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
            while True:  # later requests, which would wait forever
                self._fail([self._inbox.get()], error)

    def _step(self) -> None:
        tokens = [(self._running[key].token_ids, token_id) for key, token_id in self._engine.step()]
        self._loop.call_soon_threadsafe(_deliver, tokens)

    def _fail(self, generations: Sequence[Generation], error: Exception) -> None:
        failures = [(generation.token_ids, error) for generation in generations]
        self._loop.call_soon_threadsafe(_deliver, failures)

    def _admit(self) -> None:
        """Adds all requests that have arrived; waits for some while the engine has none."""
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
