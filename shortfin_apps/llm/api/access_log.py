"""One line in the log for each request: its route, how it ended, its tokens and its times. Never its words.

The line's fields are the record's extra ones; `server_logging.py` writes them as text or JSON.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shortfin_apps.llm.components.frontend.metrics import RequestTimer
from shortfin_apps.llm.components.frontend.text_stream import PendingAnswer, TextRequest

logger = logging.getLogger(__name__)

PROBES = frozenset({"/health", "/ready", "/metrics"})  # asked every few seconds, so told at `debug`
STRANGER_STATUSES = (401, 403)  # told even there
MAX_PATH_CHARS = 200
SERVER_FAILED = 500

# The id of the request that the running task serves; every line that is logged meanwhile carries it.
current_request_id: ContextVar[str] = ContextVar("current_request_id", default="")

_SECRET = secrets.token_bytes(32)  # of this process, as with API keys: a hash tells nothing of a name


@dataclass(slots=True)
class AccessEntry:
    """Facts about a request so far; routes and error handlers add to it, the middleware writes it.

    `tenant` is a hash, `error` the code of the error in the answer, `requests` the engine requests made for
    it, and `pending` those of them that were admitted.
    """

    began_s: float
    status: int | None = None  # None while no answer has begun
    tenant: str | None = None
    error: str | None = None
    requests: Sequence[TextRequest] = ()
    pending: Sequence[PendingAnswer] = ()

    def claim(self, tenant: str) -> None:
        """Notes a tenant by the name that a client gave itself, unless a key said who it is."""
        if tenant and self.tenant is None:
            digest = hashlib.blake2b(tenant.encode("utf-8", "surrogatepass"), key=_SECRET, digest_size=8)
            self.tenant = digest.hexdigest()

    def rid(self, request_id: str) -> str | None:
        """The first id that the client chose in the body."""
        first = self.requests[0].request_id if self.requests else request_id
        return None if first.startswith(request_id) else first

    def figures(self) -> dict[str, Any]:
        """Tokens and times; None for what never came to be. A prompt counts once, whatever its choices."""
        timers = [answer.timer for answer in self.pending]
        firsts = [answer.timer for answer in self.pending if answer.request.choice == 0]
        prompts = [request.prompt_ids for request in self.requests if request.choice == 0]
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
    """Writes the line when the answer is over, whichever way, on the clock of the metrics (seconds)."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float]) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry = AccessEntry(began_s=self._clock())
        scope.setdefault("state", {})["access"] = entry

        async def send_noting_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        except Exception:
            entry.status = entry.status or SERVER_FAILED  # answered further out
            entry.error = "INTERNAL_ERROR"
            raise
        finally:
            _write(scope, entry, self._clock() - entry.began_s)


def access_of(request: Request) -> AccessEntry:
    entry: AccessEntry = request.state.access
    return entry


def _write(scope: Scope, entry: AccessEntry, total_s: float) -> None:
    route = _route(scope)
    is_probe = route in PROBES and entry.status not in STRANGER_STATUSES
    request_id: str = scope["state"]["request_id"]
    fields = {
        "request_id": request_id,
        "method": scope["method"],
        "route": route,
        "status": entry.status,
        "tenant": entry.tenant,
        "rid": entry.rid(request_id),
        **entry.figures(),
        "total_s": round(total_s, 4),
        "error": entry.error,
    }
    logger.log(logging.DEBUG if is_probe else logging.INFO, "request", extra=fields)


def _route(scope: Scope) -> str:
    """The route's own path, without what a client puts into it; the path asked for where there is none."""
    path: str = getattr(scope.get("route"), "path", "")
    return path or scope["path"].removeprefix(scope.get("root_path", ""))[:MAX_PATH_CHARS]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _seconds(values: Iterable[float], choose: Callable[[list[float]], float]) -> float | None:
    """One of several sequences' times, to a tenth of a millisecond."""
    listed = list(values)
    return round(choose(listed), 4) if listed else None


def _reasons(timers: Iterable[RequestTimer]) -> str | None:
    """Why the sequences ended, each reason once."""
    reasons = dict.fromkeys(timer.finish_reason.value for timer in timers if timer.finish_reason)
    return ",".join(reasons) or None
