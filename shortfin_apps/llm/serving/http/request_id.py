"""The id of the request that the current task serves; logs add it to every line.

This is a separate module because logging is set up before the HTTP libraries are imported.
"""

from __future__ import annotations

from contextvars import ContextVar

current_request_id: ContextVar[str] = ContextVar("current_request_id", default="")
