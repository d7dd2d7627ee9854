from __future__ import annotations

import pytest

from shortfin_apps.llm.serving.server.config import ServerConfigError
from shortfin_apps.llm.serving.server.model_loading import Loaded
from shortfin_apps.llm.serving.server.start_up import exit_status_of
from tests.serving.api.loopback import loopback

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
        exit_status_of(running.server.failure, was_forced=False)
    assert "\n" not in str(caught.value)
