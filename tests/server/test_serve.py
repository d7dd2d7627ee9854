from __future__ import annotations

import pytest

from shortfin_apps.llm.server import serve as server
from shortfin_apps.llm.server.config import ServerConfigError
from shortfin_apps.llm.server.model_loading import Loaded
from tests.api.loopback import loopback

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        RuntimeError("Error creating driver: INTERNAL; thread creation failed with 11"),
        RuntimeError("RESOURCE_EXHAUSTED; libc allocator failed the request;\nwhile invoking"),
    ],
    ids=str,
)
async def test_running_out_of_memory_is_one_sentence(failure: Exception) -> None:
    def load(loaded: Loaded) -> Loaded:
        raise failure

    async with loopback(load=load) as running:
        await running.ended()
    with pytest.raises(ServerConfigError, match="out of memory") as caught:
        server._exit_status(running.server)
    assert "\n" not in str(caught.value)
