"""Runs coroutines until the first of them fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


async def together(work: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
    """Run `count` coroutines from `work` at once; the first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
