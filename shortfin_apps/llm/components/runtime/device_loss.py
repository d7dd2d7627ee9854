"""Errors for a device that has failed permanently."""

from __future__ import annotations

from shortfin_apps.llm.contract.errors import DeviceLostError


def lost_error(cause: Exception) -> DeviceLostError:
    reason = str(cause).partition("\n")[0]
    if "RESOURCE_EXHAUSTED" in reason:
        return DeviceLostError(
            f"the device ran out of memory; restart the server with fewer --pages ({reason})"
        )
    return DeviceLostError(f"the device has failed for good; restart the server ({reason})")


def copy_of(error: DeviceLostError) -> DeviceLostError:
    """Returns a separate error for each invocation, because an error's traceback grows when it is raised."""
    return DeviceLostError(str(error))
