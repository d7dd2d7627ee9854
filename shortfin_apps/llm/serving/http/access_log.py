"""Access log: one line per request with its route, result, token counts and times, but never its text.

The fields are the log record's extra attributes; `serving/server/logs.py` formats them as text or JSON.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shortfin_apps.llm.serving.frontend.metrics import RequestTimer
from shortfin_apps.llm.serving.frontend.text_stream import PendingAnswer, TextRequest

logger = logging.getLogger(__name__)

# Requested every few seconds, so logged at `debug`.
PROBES = frozenset(
    {"/health", "/ready", "/live", "/health_generate", "/load", "/get_load", "/get_model_info", "/metrics"}
)
DENIED_STATUSES = (401, 403)  # logged at `info` even for probes
MAX_PATH_CHARS = 200
SERVER_FAILED = 500

_SECRET = secrets.token_bytes(32)  # per process, so that hashes do not reveal tenant names; see `auth.py`


@dataclass(slots=True)
class AccessEntry:
    """Data for one request's log line, collected by routes and error handlers, written by the middleware.

    `tenant` is a hash, `error` the error code in the answer, `requests` the engine requests made for it, and
    `pending` the answers of the admitted requests.
    """

    began_s: float
    status: int | None = None  # None until the answer has begun
    tenant: str | None = None
    error: str | None = None
    requests: Sequence[TextRequest] = ()
    pending: Sequence[PendingAnswer] = ()

    def set_claimed_tenant(self, tenant: str) -> None:
        """Set the tenant to a hash of the name that the client sent, unless an API key has set the tenant."""
        if tenant and self.tenant is None:
            self.tenant = claimed_tenant(tenant)

    def rid(self, request_id: str) -> str | None:
        """Return the request id given in the body; None if the body gives none."""
        first = self.requests[0].request_id if self.requests else request_id
        return None if first.startswith(request_id) else first

    def measurements(self) -> dict[str, Any]:
        """Return token counts and times, None where unknown. A prompt with several choices counts once."""
        timers = [answer.timer for answer in self.pending]
        firsts = [answer.timer for answer in self.pending if answer.request.choice == 0]
        prompts = [request.prompt_token_ids for request in self.requests if request.choice == 0]
        return {
            "sequences": len(self.requests) or None,
            "tokens_in": sum(map(len, prompts)) or None,
            "tokens_cached": sum(timer.cached_tokens for timer in firsts) if timers else None,
            "tokens_out": sum(timer.num_tokens for timer in timers) if timers else None,
            "queue_s": _seconds(_known(timer.queue_s for timer in timers), max),
            "ttft_s": _seconds((s - self.began_s for s in _known(t.first_s for t in timers)), min),
            "finish_reason": _reasons(timers),
        }


class AccessLogMiddleware:
    """Logs a line when a request ends, for any reason. `clock` (seconds) is the one used by the metrics."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float]) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry = AccessEntry(began_s=self._clock())
        scope.setdefault("state", {})["access"] = entry

        async def send_and_record_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_record_status)
        except Exception:
            entry.status = entry.status or SERVER_FAILED  # an outer handler answers
            entry.error = "INTERNAL_ERROR"
            raise
        finally:
            _write(scope, entry, self._clock() - entry.began_s)


def claimed_tenant(name: str) -> str:
    """Return a hash that stands for a tenant name chosen by the client."""
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=_SECRET, digest_size=8).hexdigest()


def access_of(request: Request) -> AccessEntry:
    entry: AccessEntry = request.state.access
    return entry


def _write(scope: Scope, entry: AccessEntry, total_s: float) -> None:
    route = route_of(scope)
    is_probe = route in PROBES and entry.status not in DENIED_STATUSES
    request_id: str = scope["state"]["request_id"]
    fields = {
        "request_id": request_id,
        "method": scope["method"],
        "route": route,
        "status": entry.status,
        "tenant": entry.tenant,
        "rid": entry.rid(request_id),
        **entry.measurements(),
        "total_s": round(total_s, 4),
        "error": entry.error,
    }
    logger.log(logging.DEBUG if is_probe else logging.INFO, "request", extra=fields)


def route_of(scope: Scope) -> str:
    """Return the route's path, with placeholders for parameters; the requested path if no route matches."""
    path: str = getattr(scope.get("route"), "path", "")
    return path or scope["path"].removeprefix(scope.get("root_path", ""))[:MAX_PATH_CHARS]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _seconds(values: Iterable[float], choose: Callable[[list[float]], float]) -> float | None:
    """Return `choose` applied to the times, rounded to 0.1 ms; None without times."""
    listed = list(values)
    return round(choose(listed), 4) if listed else None


def _reasons(timers: Iterable[RequestTimer]) -> str | None:
    """Return the distinct finish reasons of the sequences, joined by commas; None if there are none."""
    reasons = dict.fromkeys(timer.finish_reason.value for timer in timers if timer.finish_reason)
    return ",".join(reasons) or None
