"""Errors that this package raises.

LlmError
├── InvalidRequestError        the request is wrong; names the parameter         (HTTP 400)
│   └── ConstraintError        its grammar or bans end its output early           (HTTP 400)
├── OverloadedError            queue full, try again after `retry_after_s`       (HTTP 429)
├── UnavailableError           loading, draining or stopped                      (HTTP 503)
├── RequestAbortedError        the client left or aborted the request            (HTTP 499)
│   └── DeadlineExceededError  its deadline passed before its first token        (HTTP 408)
├── InvocationError            the device failed on this request                 (HTTP 500)
│   └── DeviceLostError        all later requests fail until it is reopened
├── ArtifactError              VMFB, parameters, config or tokenizer do not fit  (exit 2)
│   └── SelfTestError          the model computes wrong results                  (exit 2)
└── BuildError                 the builder cannot make this artefact             (exit 2)

A message is one sentence for the user: the problem and, if possible, what to do.
"""

from __future__ import annotations

import errno

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LlmError(Exception):
    """Base class of this package's errors."""


class InvalidRequestError(LlmError):
    """A request that cannot be served in its present form.

    `param` is the name of the offending field in the caller's spelling, or None; `extra` is added to the
    error body (upstream's clients read such fields).
    """

    def __init__(
        self, message: str, param: str | None = None, extra: dict[str, object] | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.extra = extra or {}


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that is not served here."""


class ConstraintError(InvalidRequestError):
    """The output cannot continue because of the request's own grammar, bans or other constraints."""


class OverloadedError(LlmError):
    """The queue is full; `retry_after_s` estimates when it will have room, in seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(LlmError):
    """The engine does not accept requests in its present state."""


class RequestAbortedError(LlmError):
    """The request was aborted."""


class DeadlineExceededError(RequestAbortedError):
    """The request's deadline passed; the tokens generated until then are its answer."""


class InvocationError(LlmError):
    """An invocation failed; only the requests in its batch get this error."""


class DeviceLostError(InvocationError):
    """The device has failed permanently; a server must be restarted."""


class ArtifactError(LlmError):
    """The files of a model do not fit together, or cannot run on this host."""


class SelfTestError(ArtifactError):
    """Entries of the model compute other results than the reference, or than before."""


class BuildError(LlmError):
    """The source cannot be built for the target."""


def is_library_error(error: BaseException) -> bool:
    """Returns True for an error of a Rust library: a bare Exception, or pyo3's BaseException for a panic.

    The latter has no public name.
    """
    return type(error) is Exception or type(error).__name__ == "PanicException"


def file_problem(error: OSError) -> str:
    """Returns a sentence about the file that `error` names.

    For unexpected failures, e.g. of a file in a directory that this user may not search. Raises `error` if
    it names no file, unless a disk is full: standard output has no name.
    """
    if error.filename is not None:
        return f"{error.filename}: cannot be used ({error.strerror}); check its path and who may read it"
    if error.errno not in NO_SPACE:
        raise error
    return f"the output cannot be written ({error.strerror}); free space on its disk"


# The extra that installs each module, as in pyproject.toml.
EXTRA_OF = {
    **dict.fromkeys(("gguf", "safetensors", "filelock", "platformdirs"), "build"),
    "elftools": "gpu-build",
    "huggingface_hub": "hub",
    **dict.fromkeys(("httpx", "httpx_sse", "httpx_aiohttp", "aiohttp"), "terminal"),
    **dict.fromkeys(("prompt_toolkit", "markdown_it", "shtab"), "terminal"),
}


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Returns a sentence that says what to install, or None if the module is of no extra."""
    module = (error.name or "").partition(".")[0]
    if module == "emulated_gpu":  # in no index
        return "this needs emulated_gpu: run `pip install ./emulated_gpu` in a checkout of shortfin-llm"
    if module not in EXTRA_OF:
        return None
    return f"this needs {module}: run `pip install 'shortfin-llm[{EXTRA_OF[module]}]'`"
