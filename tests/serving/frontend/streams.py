"""A prompt, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from shortfin_apps.llm.components.request.messages import Delta
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine

PROMPT = [3, 1, 4, 1, 5]


async def tokens_of(stream: AsyncIterator[Delta]) -> list[int]:
    return [token_id async for delta in stream for token_id in delta.token_ids]


async def until_idle(engine: AsyncEngine) -> None:
    while engine.stats().num_running or engine.stats().num_waiting:
        await asyncio.sleep(0)
