"""The id of the request that the current task serves; logs add it to every line.

A separate module, as logging is set up before the HTTP libraries are imported.
"""

from __future__ import annotations

from contextvars import ContextVar

current_request_id: ContextVar[str] = ContextVar("current_request_id", default="")
