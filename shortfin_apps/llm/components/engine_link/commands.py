"""Commands to all processes that answer requests, whichever of them was asked."""

from __future__ import annotations

import msgspec


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Ends the requests with these ids; of `tenant` alone, unless it is None. Counts sequences."""

    request_ids: tuple[str, ...]
    tenant: str | None = None


class AbortAll(msgspec.Struct, frozen=True, tag=True):
    """Ends all requests. Counts sequences."""


class SetLogLevel(msgspec.Struct, frozen=True, tag=True):
    """Sets the least severe level to log, as in Python's `logging`. Counts nothing."""

    level: str


class ReadMetrics(msgspec.Struct, frozen=True, tag=True):
    """Returns `ServerMetrics.counts`."""


Command = AbortRequests | AbortAll | SetLogLevel | ReadMetrics
