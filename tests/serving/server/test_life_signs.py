from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from shortfin_apps.llm.serving.server.life_signs import LOADING, LOST, SERVING, LifeSigns


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The supervisor's end and the server's."""
    ours, theirs = os.pipe()
    yield ours, theirs
    os.close(theirs)


def test_signs_say_whether_the_server_serves(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    serves = threading.Event()
    LifeSigns(theirs, interval_s=0.001).start(serves.is_set)
    assert os.read(ours, 1) == LOADING
    serves.set()
    while (sign := os.read(ours, 1)) == LOADING:
        pass
    assert sign == SERVING
    LifeSigns(theirs).tell_loss()
    while (sign := os.read(ours, 1)) == SERVING:
        pass
    assert sign == LOST
    stopped = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        os.close(ours)  # the supervisor ends
        assert stopped.wait(30)
    finally:
        signal.signal(signal.SIGTERM, before)
