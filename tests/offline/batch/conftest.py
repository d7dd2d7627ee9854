from __future__ import annotations

import os

import pytest

from tests.client.conftest import running_server, server

__all__ = ["running_server", "server"]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine crashes in these tests, and hypothesis writes thousands of files."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
