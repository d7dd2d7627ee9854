"""Translates shortfin's errors into those of this package."""

from __future__ import annotations

from typing import Any

import shortfin.array as sfnp

from shortfin_apps.llm.errors import DeviceLostError, InvocationError

_ABORTED = "the semaphore was aborted"


class TimelineError(Exception):
    """Work that was submitted to the device has failed."""


def is_of_hip(error: Exception) -> bool:
    """Whether the HIP driver has failed; what a program refuses is no failure of the driver."""
    text = str(error)
    return isinstance(error, TimelineError) or "HIP driver error" in text or _ABORTED in text


def cause_of(fiber: Any, error: Exception) -> Exception:
    """The failure behind an error that only says that the fiber's timeline was aborted; else the error."""
    if _ABORTED in str(error):
        try:
            # Fails with the cause, as the timeline that it would wait for has failed.
            sfnp.device_array.for_device(fiber.device(0), [1], sfnp.int8)
        except Exception as cause:
            return cause
    return error


def invocation_error(error: Exception) -> InvocationError:
    if "unique semaphore capacity" in str(error):
        return DeviceLostError("the device failed too often to go on; restart the server")
    return InvocationError(f"the device failed under this invocation ({error})")
