"""The engine as the HTTP side sees it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.request.messages import Delta, GenerateCall


class EngineClient(Protocol):
    """What the HTTP side sees of the engine; `async_engine.py` implements it.

    Every method is called from the event loop's thread and returns at once.
    """

    def submit(self, call: GenerateCall) -> AsyncGenerator[Delta, None]:
        """Admits the request now and returns its stream; closing the stream early aborts it.

        Python does not tell a generator that was never started of its end: `abort` its request, too.

        Raises OverloadedError, UnavailableError or InvalidRequestError before anything is queued, and
        RequestAbortedError for what resumes when the time of draining is over.
        The last Delta carries `finish_reason`; with ERROR it carries `error` too.
        """
        ...

    def abort(self, request_id: str) -> bool:
        """Ends a request; its stream then yields a last Delta with ABORT. False when unknown."""
        ...

    def abort_all(self) -> int:
        """Aborts every request and says how many there were."""
        ...

    def flush_cache(self) -> None:
        """Forgets all cached pages that no request uses, before any request submitted from now on starts."""
        ...

    def stats(self) -> EngineStats: ...

    @property
    def max_requests(self) -> int:
        """The most requests admitted and not yet answered."""
        ...

    @property
    def max_queue_tokens(self) -> int:
        """The most prompt tokens admitted and without a first token yet; one request may have more."""
        ...

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and output together, that any request can ever have here."""
        ...

    @property
    def ready(self) -> bool:
        """Loaded, warmed up, and neither draining nor stalled."""
        ...

    @property
    def healthy(self) -> bool:
        """The engine's thread lives, its device works, and if it has work, a step ended lately."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Admits nothing more; returns when all requests ended, aborting the rest at the timeout."""
        ...
