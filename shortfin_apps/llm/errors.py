"""Every error this package raises on purpose.

LlmError
├── InvalidRequestError        the caller's fault; names the parameter            (HTTP 400)
├── OverloadedError            no room now, try again after `retry_after_s`       (HTTP 429)
├── UnavailableError           loading, draining or stopped                       (HTTP 503)
├── RequestAbortedError        the caller went away or asked to stop              (HTTP 499)
├── InvocationError            the device failed under this request               (HTTP 500)
├── ArtifactError              VMFB, parameters, config or tokenizer do not fit   (exit 2)
└── BuildError                 the builder cannot make this artefact              (exit 2)

Messages are for people: one sentence that says what is wrong and, where there is one, what to do.
"""

from __future__ import annotations


class LlmError(Exception):
    """Base of the tree above."""


class InvalidRequestError(LlmError):
    """A request that can never be served as it is.

    `param` is the name of the offending field as the caller spelled it, or None; `extra` is added
    to the error body (upstream's clients read such fields).
    """

    def __init__(
        self, message: str, param: str | None = None, extra: dict[str, object] | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.extra = extra or {}


class OverloadedError(LlmError):
    """The queue is full; `retry_after_s` is a guess at when it will not be, in seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(LlmError):
    """The engine does not take requests in its present state."""


class RequestAbortedError(LlmError):
    """The request ended because somebody aborted it."""


class InvocationError(LlmError):
    """An invocation failed; only the requests in it see this."""


class ArtifactError(LlmError):
    """What was loaded does not fit together or cannot run here."""


class BuildError(LlmError):
    """The source cannot be built for that target."""
