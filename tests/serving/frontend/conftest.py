"""An AsyncEngine over the fake device."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from tests.components.engine_fixture import Rig, make_rig
from tests.components.fake_device import fake_config


@pytest.fixture
def rig() -> Rig:
    return make_rig(fake_config(pages=64))


@pytest_asyncio.fixture
async def engine(rig: Rig) -> AsyncIterator[AsyncEngine]:
    made = AsyncEngine(rig.engine, max_requests=4)
    made.start()
    yield made
    await made.close()
