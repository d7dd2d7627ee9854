"""A fake device that a test can hold in the middle of an invocation."""

from __future__ import annotations

import asyncio
import threading

from tests.components.engine_fixture import Rig


class Gate:
    """Holds the device inside an invocation until a test opens it."""

    def __init__(self, rig: Rig) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()
        rig.program.faults.before = self._wait

    def _wait(self, entry: str) -> None:
        self.entered.set()
        assert self._open.wait(20)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 20)

    def open(self) -> None:
        self._open.set()
