"""Errors that this package raises.

LlmError
├── InvalidRequestError        the request is wrong; names the parameter         (HTTP 400)
│   ├── ContextLengthError     more tokens than the model's context holds         (HTTP 400)
│   └── ConstraintError        grammar or bans allow no next token                (HTTP 400)
├── OverloadedError            queue full, try again after `retry_after_s`       (HTTP 429)
├── UnavailableError           loading, draining or stopped                      (HTTP 503)
├── RequestAbortedError        the client left or aborted the request            (HTTP 499)
│   └── DeadlineExceededError  the deadline passed before the first token        (HTTP 408)
├── InvocationError            the device failed on this request                 (HTTP 500)
│   └── DeviceLostError        all requests fail until the server is restarted  (HTTP 503, exit 75)
│       └── OutOfDeviceMemoryError   at the start (exit 2), as a restart does not help
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

    `param` is the name of the invalid field as the client spells it, or None. `extra` are further fields of
    the error body, which upstream's clients read.
    """

    def __init__(
        self, message: str, param: str | None = None, extra: dict[str, object] | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.extra = extra or {}


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt and the tokens to generate, do not fit the model's context."""


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that is not served here."""


class ConstraintError(InvalidRequestError):
    """The output cannot continue because of the request's own grammar, bans or other constraints."""


class OverloadedError(LlmError):
    """The queue is full; `retry_after_s` estimates in how many seconds the queue will have room."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(LlmError):
    """The engine does not accept requests in its present state."""


class RequestAbortedError(LlmError):
    """The request was aborted."""


class DeadlineExceededError(RequestAbortedError):
    """The request's deadline passed; the tokens generated until then are the answer."""


class InvocationError(LlmError):
    """An invocation failed; only the requests in its batch get this error."""


class DeviceLostError(InvocationError):
    """The device has failed permanently; the server must be restarted."""


class OutOfDeviceMemoryError(DeviceLostError):
    """The device has failed permanently as its memory was too small; a restart alone does not help."""


class ArtifactError(LlmError):
    """The files of a model do not fit together, or cannot run on this host."""


class SelfTestError(ArtifactError):
    """Entries of the model compute other results than the reference, or than in an earlier run."""


class BuildError(LlmError):
    """The source cannot be built for the target."""


def is_library_error(error: BaseException) -> bool:
    """Return whether a Rust library raised `error`: a bare Exception, or pyo3's PanicException for a panic.

    PanicException is a BaseException that cannot be imported, so its name is compared.
    """
    return type(error) is Exception or type(error).__name__ == "PanicException"


def file_problem(error: OSError) -> str:
    """Return a message about an unexpected OSError, e.g. of a file in a directory that may not be searched.

    If `error` names no file (standard output has no name), returns a message for a full disk, and raises
    `error` for any other problem.
    """
    if error.filename is not None:
        return f"{error.filename}: cannot be used ({error.strerror}); check its path and who may read it"
    if error.errno not in NO_SPACE:
        raise error
    return f"the output cannot be written ({error.strerror}); free space on its disk"


# The extra (of pyproject.toml) that installs each module.
EXTRA_OF = {
    **dict.fromkeys(("gguf", "safetensors", "filelock", "platformdirs"), "build"),
    "elftools": "gpu-build",
    "huggingface_hub": "hub",
    **dict.fromkeys(("httpx", "httpx_sse", "httpx_aiohttp", "aiohttp"), "terminal"),
    **dict.fromkeys(("prompt_toolkit", "markdown_it", "shtab"), "terminal"),
}


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Return a sentence that says what to install, or None if no extra installs the module."""
    module = (error.name or "").partition(".")[0]
    if module == "emulated_gpu":  # in no index
        return "this needs emulated_gpu: run `pip install ./emulated_gpu` in a checkout of shortfin-llm"
    if module not in EXTRA_OF:
        return None
    return f"this needs {module}: run `pip install 'shortfin-llm[{EXTRA_OF[module]}]'`"
