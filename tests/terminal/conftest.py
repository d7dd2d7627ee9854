from __future__ import annotations

from pathlib import Path

import pytest

from tests.client.conftest import running_server, server

__all__ = ["running_server", "server"]


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a chat keeps its history, lest a test write to that of its user."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"
