from __future__ import annotations

from tests.client.conftest import running_server, server

__all__ = ["running_server", "server"]
