"""Failures on the device after the submission, which only iree.runtime lets a test provoke."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

import iree.runtime as iree
import numpy as np
import pytest

from shortfin_apps.llm.components.runtime.iree_device import IreeProgram
from shortfin_apps.llm.components.runtime.iree_local import LocalDevice, open_local_task
from shortfin_apps.llm.contract.errors import ArtifactError, InvocationError
from shortfin_apps.llm.contract.host_cpu import MAX_CPU_WORKERS

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def device() -> Iterator[LocalDevice]:
    """A device on a HAL device of its own, as the tests break it; never released, like the real one."""
    open_local_task()
    hal = iree.get_driver("local-task").create_device_by_uri("local-task", allocators=["caching"])
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(hal))
    device = LocalDevice(hal)
    yield device
    device.close()


@pytest.fixture
def program(device: LocalDevice, artefacts: Path) -> IreeProgram:
    return device.load_program(artefacts / "fenced.vmfb", [artefacts / "model.irpa"], "m")


def check_works(device: LocalDevice, program: IreeProgram) -> None:
    (result,) = program.submit("double_i64", [device.upload(np.ones((1, 2), np.int64))]).wait()
    np.testing.assert_array_equal(device.download(result), [[2, 2]])


def test_a_buffer_only_dispatches_write_is_aligned_to_a_page(device: LocalDevice) -> None:
    slab = device.allocate((3, 5000), np.dtype(np.float16), only_dispatches=True)
    assert slab.map_bytes().ctypes.data % mmap.PAGESIZE == 0


def test_workers_beyond_the_limit_of_the_runtime_are_refused(device: LocalDevice) -> None:
    with pytest.raises(ArtifactError, match="at most 64 CPU workers"):
        open_local_task(MAX_CPU_WORKERS + 1)


def test_an_invocation_that_fails_in_flight(device: LocalDevice, program: IreeProgram) -> None:
    pending = program.submit("slow", [device.upload(np.ones((800, 800), np.float32))])
    device._timeline.last._semaphore.fail("the card fell out")
    for _ in range(2):
        with pytest.raises(InvocationError, match="the card fell out"):
            pending.wait()


def test_a_result_in_flight_is_an_argument(device: LocalDevice, program: IreeProgram) -> None:
    image = device.upload(np.eye(800, dtype=np.float32))
    first, _ = program.submit("slow", [image]).results()
    pending = program.submit("slow", [first])
    result, _ = pending.wait()
    np.testing.assert_array_equal(device.download(result), np.eye(800))


def test_the_result_of_a_failed_invocation_is_refused_as_an_argument(
    device: LocalDevice, program: IreeProgram
) -> None:
    first, _ = program.submit("slow", [device.upload(np.ones((800, 800), np.float32))]).results()
    device._timeline.last._semaphore.fail("the card fell out")
    with pytest.raises(InvocationError):
        program.submit("slow", [first]).wait()
    check_works(device, program)


def test_a_failure_first_seen_by_the_next_submission(device: LocalDevice, program: IreeProgram) -> None:
    check_works(device, program)
    device._timeline.last._semaphore.fail("the card fell out")
    pending = program.submit("double_i64", [device.upload(np.ones((1, 2), np.int64))])
    with pytest.raises(InvocationError):
        pending.wait()
    check_works(device, program)


def test_a_failure_before_an_entry_without_fences(
    device: LocalDevice, program: IreeProgram, artefacts: Path
) -> None:
    plain = device.load_program(artefacts / "unfenced.vmfb", [], "plain")
    check_works(device, program)
    device._timeline.last._semaphore.fail("the card fell out")
    plain.submit("negate", [device.upload(np.ones(4, np.float32))]).wait()
    check_works(device, program)
