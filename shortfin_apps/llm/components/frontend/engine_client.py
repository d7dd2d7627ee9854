"""The interface of the engine to the HTTP side."""

from __future__ import annotations

from typing import Protocol

from shortfin_apps.llm.components.engine.snapshot import Snapshot
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.frontend.delta_stream import DeltaStream
from shortfin_apps.llm.components.recorder.dumps import WrittenDump
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.errors import LlmError


class EngineClient(Protocol):
    """Implemented by AsyncEngine. Methods are called in the event loop's thread.

    All but `submit`, `dump`, `snapshot` and `drain` return at once.
    """

    async def submit(self, call: GenerateCall) -> DeltaStream:
        """Admits the request and returns its stream; closing the stream early aborts it.

        A submission that is cancelled leaves no request behind. The last Delta carries `finish_reason`;
        with ERROR it carries `error` too. Raises OverloadedError, UnavailableError or InvalidRequestError
        before anything is queued, and RequestAbortedError for a call that resumes when the time for draining
        is over.
        """
        ...

    def abort(self, request_id: str, error: LlmError | None = None) -> bool:
        """Ends a request; its stream then yields a last Delta with ABORT and `error`.

        False if it is unknown.
        """
        ...

    def abort_all(self) -> int:
        """Aborts every request; returns how many there were."""
        ...

    def flush_cache(self) -> None:
        """Frees all cached pages that no request uses, before any request submitted from now on starts."""
        ...

    async def dump(self, reason: str) -> WrittenDump:
        """Writes what the flight recorder has to a file, also while the device does not answer.

        Raises InvalidRequestError where there is none, and DumpError, which may have become an LlmError.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def snapshot(self, after: int = 0) -> Snapshot:
        """The engine between two steps, with the steps behind number `after` that it has recorded.

        It records them for some seconds after each call. Waits for the step under way. Raises
        UnavailableError when the engine has ended.
        """
        ...

    @property
    def max_requests(self) -> int:
        """The most requests admitted and not yet answered."""
        ...

    @property
    def max_queue_tokens(self) -> int:
        """The most prompt tokens admitted without a first token yet; a single request may have more."""
        ...

    @property
    def max_request_tokens(self) -> int:
        """The most tokens of prompt and output together that a request can have."""
        ...

    @property
    def returns_logits(self) -> bool:
        """Whether the model returns whole rows of logits; without, a request with a penalty is refused."""
        ...

    @property
    def ready(self) -> bool:
        """Loaded, warmed up, and neither draining nor stalled."""
        ...

    @property
    def healthy(self) -> bool:
        """The engine's thread is alive, its device works, and no step takes longer than the stall timeout."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Stops admission; returns when all requests have ended, aborting those left at the timeout."""
        ...
