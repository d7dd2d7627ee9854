from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import closing

import pytest

from shortfin_apps.llm.tools.cluster import program
from shortfin_apps.llm.tools.cluster.ports import LOOPBACK, HandedDown, HeldPort


async def test_a_worker_serves_on_the_port_that_it_was_handed(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(flags: Sequence[str], listener: socket.socket) -> int:
        assert flags == ["--port", str(held.port)]
        assert isinstance(listener, HandedDown)
        assert listener.getsockname()[1] == held.port
        assert not listener.get_inheritable()
        listener.close()
        listener.close()
        return 7

    monkeypatch.setattr("shortfin_apps.llm.serving.server.command.main", serve)
    with closing(HeldPort(LOOPBACK)) as held:
        fds = [str(os.dup(fd)) for fd in held.fds]
        assert program.worker([*fds, "--port", str(held.port)]) == 7
