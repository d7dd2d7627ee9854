from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scripted_server import ScriptedServer


@pytest.fixture(scope="session")
def running_server() -> Iterator[ScriptedServer]:
    with ScriptedServer().running() as server:
        yield server


@pytest.fixture
def server(running_server: ScriptedServer) -> ScriptedServer:
    running_server.reset()
    return running_server
