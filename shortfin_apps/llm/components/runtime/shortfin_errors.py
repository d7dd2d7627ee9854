"""Translates shortfin's errors to this package's errors."""

from __future__ import annotations

from typing import Any

import shortfin.array as sfnp

from shortfin_apps.llm.contract.errors import DeviceLostError, InvocationError

_ABORTED = "the semaphore was aborted"


class TimelineError(Exception):
    """Work submitted to the device has failed."""


def is_of_hip(error: Exception) -> bool:
    """Returns True for a HIP driver failure; a program that refuses its arguments is not one."""
    text = str(error)
    return isinstance(error, TimelineError) or "HIP driver error" in text or _ABORTED in text


def cause_of(fiber: Any, error: Exception) -> Exception:
    """Returns the cause of an error that only reports an aborted timeline; otherwise the error itself."""
    if _ABORTED in str(error):
        try:
            # Fails with the cause, because the timeline that it would wait for has failed.
            sfnp.device_array.for_device(fiber.device(0), [1], sfnp.int8)
        except Exception as cause:
            return cause
    return error


def invocation_error(error: Exception) -> InvocationError:
    if "unique semaphore capacity" in str(error):
        return DeviceLostError("the device failed too often to go on; restart the server")
    return InvocationError(f"the device failed under this invocation ({error})")
