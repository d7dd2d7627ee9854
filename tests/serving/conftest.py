from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.serving.api.harness import Harness


@pytest_asyncio.fixture
async def harness() -> AsyncIterator[Harness]:
    harness = Harness()
    yield harness
    assert not harness.engine.live, "every request was answered or aborted"
    await harness.client.aclose()
