"""The engine's interface for the HTTP side."""

from __future__ import annotations

from typing import Protocol

from shortfin_apps.llm.components.engine.snapshot import Snapshot
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.recorder.dumps import WrittenDump
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.serving.frontend.delta_stream import DeltaStream


class EngineClient(Protocol):
    """Interface of AsyncEngine and RemoteEngine. Callers must run in the event loop's thread.

    All methods except `submit`, `dump`, `snapshot` and `drain` return immediately.
    """

    async def submit(self, call: GenerateCall) -> DeltaStream:
        """Admit the request and return its stream; closing the stream early aborts the request.

        A cancelled submission leaves no request in the engine. The last Delta has a `finish_reason` and, if
        that is ERROR, an `error`. Raises OverloadedError, UnavailableError or InvalidRequestError before
        anything is queued, and RequestAbortedError for a call that resumes after the drain timeout.
        """
        ...

    def abort(self, request_id: str, error: LlmError | None = None) -> bool:
        """End a request. The request's stream then yields a last Delta with ABORT and `error`.

        Returns False if the request is unknown.
        """
        ...

    def abort_all(self) -> int:
        """Abort every request and return their number."""
        ...

    def flush_cache(self) -> None:
        """Free all unused cached pages before any request submitted later starts."""
        ...

    async def dump(self, reason: str) -> WrittenDump:
        """Write the contents of the flight recorder to a file, even while the device does not answer.

        Raises InvalidRequestError if there is no recorder, and DumpError (in an API process: LlmError) if the
        dump cannot be written.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def snapshot(self, after: int = 0) -> Snapshot:
        """Return the engine's state between two steps, with the recorded steps numbered above `after`.

        Steps are recorded for some seconds after each call. Waits for the current step. Raises
        UnavailableError when the engine has stopped.
        """
        ...

    @property
    def max_requests(self) -> int:
        """Maximum number of requests admitted and not yet answered."""
        ...

    @property
    def max_queue_tokens(self) -> int:
        """Maximum number of admitted prompt tokens without a first token; one request alone may have more."""
        ...

    @property
    def max_request_tokens(self) -> int:
        """Maximum number of prompt and output tokens of one request."""
        ...

    @property
    def returns_logits(self) -> bool:
        """True if the model returns full rows of logits; otherwise requests with a penalty are refused."""
        ...

    @property
    def ready(self) -> bool:
        """True if the engine is loaded, warmed up, and neither draining nor stalled."""
        ...

    @property
    def healthy(self) -> bool:
        """True if the engine's thread is alive, its device works, and no step exceeds the stall timeout."""
        ...

    @property
    def problem(self) -> str | None:
        """Why the engine is not healthy; None while it is."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Stop admission and wait for all requests to end; abort the remaining ones at the timeout."""
        ...
