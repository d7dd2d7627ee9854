"""Classifies errors of devices: permanent failures, shortfin's errors, and VMFBs for another chip."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shortfin_apps.llm.contract.errors import (
    ArtifactError,
    DeviceLostError,
    InvocationError,
    OutOfDeviceMemoryError,
)
from shortfin_apps.llm.contract.gpu_code.code_object import chip_of, code_objects_in


def lost_error(cause: Exception) -> DeviceLostError:
    reason = str(cause).partition("\n")[0]
    if "RESOURCE_EXHAUSTED" in reason:
        return OutOfDeviceMemoryError(
            f"the device ran out of memory; restart the server with fewer --pages, then retry ({reason})"
        )
    return DeviceLostError(f"the device has failed for good; restart the server, then retry ({reason})")


def copy_of(error: DeviceLostError) -> DeviceLostError:
    """Copy an error, as each invocation needs its own: raising an error again makes its traceback longer."""
    return type(error)(str(error))


_ABORTED = "the semaphore was aborted"


class TimelineError(Exception):
    """Work submitted to the device has failed."""


def is_of_hip(error: Exception) -> bool:
    """Return whether `error` is a failure of the HIP driver, not of a program that refuses arguments."""
    text = str(error)
    return isinstance(error, TimelineError) or "HIP driver error" in text or _ABORTED in text


def cause_of(fiber: Any, error: Exception) -> Exception:
    """Return the cause of an error that only reports an aborted timeline; `error` itself otherwise."""
    import shortfin.array as sfnp

    if _ABORTED in str(error):
        try:
            # This allocation fails with the cause, because it would wait for the timeline that has failed.
            sfnp.device_array.for_device(fiber.device(0), [1], sfnp.int8)
        except Exception as cause:
            return cause
    return error


def invocation_error(error: Exception) -> InvocationError:
    if "unique semaphore capacity" in str(error):
        return DeviceLostError("the device failed too often to go on; restart the server, then retry")
    return InvocationError(f"the device failed under this invocation ({error})")


def wrong_chip_error(vmfb: Path) -> ArtifactError:
    """Return the error for a VMFB whose machine code HIP refused because it is for another chip."""
    chips = ", ".join(sorted(set(_chips_of(vmfb)))) or "another chip"
    return ArtifactError(
        f"{vmfb}: compiled for {chips}, which the GPU is not (HIP calls it {', '.join(_gpu_names())}); "
        "rebuild it with `shortfin-llm build --device hip:CHIP`, or choose another GPU with --device-ids"
    )


def _chips_of(vmfb: Path) -> Iterator[str]:
    for data in code_objects_in(vmfb.read_bytes()):
        try:
            yield chip_of(data)
        except ArtifactError:  # an unknown chip
            continue


def _gpu_names() -> list[str]:
    """Return HIP's names of the GPUs, asking IREE because shortfin reports only IDs."""
    import iree.runtime as iree

    return sorted({device["name"] for device in iree.get_driver("hip").query_available_devices()})
