"""Commands that run in all API processes, whichever of them received the request."""

from __future__ import annotations

import msgspec


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Abort the requests with these IDs; only of `tenant`, unless it is None. Counts sequences."""

    request_ids: tuple[str, ...]
    tenant: str | None = None


class AbortAll(msgspec.Struct, frozen=True, tag=True):
    """Abort all requests. Counts sequences."""


class SetLogLevel(msgspec.Struct, frozen=True, tag=True):
    """Set the minimum log level, as in Python's `logging`. Counts nothing."""

    level: str


class ReadMetrics(msgspec.Struct, frozen=True, tag=True):
    """Return `ServerMetrics.counts`."""


Command = AbortRequests | AbortAll | SetLogLevel | ReadMetrics
