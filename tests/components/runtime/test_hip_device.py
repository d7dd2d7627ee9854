"""What only a GPU does, on the emulated one; test_device.py has what all devices do."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from emulated_gpu.control import Control
from emulated_gpu.library import EmulatedGpu
from shortfin_apps.llm.components.runtime.device import Device, Pending, Program
from shortfin_apps.llm.components.runtime.open import Runtime, open_device
from shortfin_apps.llm.contract.errors import ArtifactError, InvocationError
from tests.runtimes import RUNTIMES, SHORTFIN, needs_shortfin

from .conftest import ASYNC, FENCED, compile_for_hip

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(120)]

F32 = np.dtype(np.float32)
COMPUTE_UNITS = 304  # of the emulated gfx942

# The first stage adds its page table to the input. The second keeps twice what it had plus that,
# in place, and returns what it keeps plus what it was passed.
STAGES = """
module @stages attributes { stream.affinity.default = #hal.device.promise<@__device_0> } {
  util.func public @step$async(
      %x_: !hal.buffer_view, %first_: !hal.buffer_view, %second_: !hal.buffer_view,
      %wait: !hal.fence, %signal: !hal.fence
  ) -> !hal.buffer_view attributes {
    inlining_policy = #util.inline.never, iree.abi.model = "coarse-fences", iree.abi.stub
  } {
    %x = hal.tensor.import on(#hal.device.promise<@__device_0>) wait(%wait) => %x_
        : !hal.buffer_view -> tensor<8xf32>
    %first = hal.tensor.import on(#hal.device.promise<@__device_0>) wait(%wait) => %first_
        : !hal.buffer_view -> tensor<8xf32>
    %second = hal.tensor.import on(#hal.device.promise<@__device_1>) wait(%wait) => %second_
        : !hal.buffer_view -> tensor<8xf32>
    %sum = arith.addf %first, %x : tensor<8xf32>
    %passed = flow.tensor.transfer %sum : tensor<8xf32> to #hal.device.promise<@__device_1>
    %twice = arith.addf %second, %second : tensor<8xf32>
    %next = arith.addf %twice, %passed : tensor<8xf32>
    %kept = hal.tensor.alias on(#hal.device.promise<@__device_1>) wait(%wait) => %next
        : tensor<8xf32> to %second_ : !hal.buffer_view
    %result = arith.addf %kept, %passed : tensor<8xf32>
    %ready:2 = hal.tensor.barrier join(%result, %kept : tensor<8xf32>, tensor<8xf32>) => %signal : !hal.fence
    %out = hal.tensor.export on(#hal.device.promise<@__device_1>) %ready#0 : tensor<8xf32> -> !hal.buffer_view
    util.return %out : !hal.buffer_view
  }
}
"""

# Runs `accumulate` on a GPU that fails at some time, and says what came of each step.
FAIL = """
import sys
from pathlib import Path
import numpy as np
from emulated_gpu.control import Control
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.contract.errors import InvocationError

folder, runtime, fault, close = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "close"
control = Control()
device = open_device("hip", runtime)
program = device.load_program(folder / "fenced.vmfb", [folder / "model.irpa"], "m")
cache = device.allocate((8,), np.dtype(np.float32))
ones = np.ones(8, np.float32)

def attempt(work):
    try:
        work()
        print("done")
    except InvocationError as error:
        print(error)

attempt(lambda: program.submit("accumulate", [device.upload(ones), cache]).wait())
control.command(fault)
attempt(lambda: program.submit("accumulate", [device.upload(ones), cache]).wait())
attempt(lambda: device.allocate((1 << 30,), np.dtype(np.float32)))
attempt(lambda: device.clear(cache, [1]))
attempt(lambda: device.download(cache))
if close:
    device.close()
"""


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    return cast(Runtime, request.param)


@pytest.fixture
def gpu(control: Control, runtime: Runtime) -> Iterator[Device]:
    """The second emulated GPU, for a test of its own."""
    device = open_device("hip", runtime, device_ids=["1"])
    yield device
    device.close()


@pytest.fixture
def program(gpu: Device, hip_artefacts: Path) -> Program:
    return gpu.load_program(hip_artefacts / "fenced.vmfb", [hip_artefacts / "model.irpa"], "m")


@pytest.mark.parametrize(("more", "fits"), [(0, True), (1, False)])
def test_a_launch_needs_a_compute_unit_for_each_workgroup(
    more: int, fits: bool, gpu: Device, hip_artefacts: Path, tmp_path: Path
) -> None:
    workgroups = COMPUTE_UNITS + more
    flag = '"shortfin_llm.only_dispatches" = "true",'
    assert FENCED.count(flag) == 1
    source = FENCED.replace(flag, f'{flag} shortfin_llm.compute_units = "{workgroups}",')
    vmfb = compile_for_hip(source.replace("SIDE", "16"), tmp_path / "waiting.vmfb", ASYNC)
    with nullcontext() if fits else pytest.raises(ArtifactError, match=f"has only {COMPUTE_UNITS}"):
        program = gpu.load_program(vmfb, [hip_artefacts / "model.irpa"], "m")
        assert program.entries["accumulate"].compute_units == workgroups


def run_failing(folder: Path, runtime: str, fault: str, close: str, gpu: EmulatedGpu) -> list[str]:
    """What `FAIL` prints; it must end by itself, without crashing.

    A few runs in a hundred wait forever (see shortfin_device.py), which the stall timeout of a server ends.
    """
    command = [sys.executable, "-m", "emulated_gpu", "--memory", str(gpu.memory_bytes), "--"]
    command += [sys.executable, "-W", "error", "-c", FAIL, str(folder), runtime, fault, close]
    for _ in range(2):
        with suppress(subprocess.TimeoutExpired):
            return _printed_by(command)
    return _printed_by(command)


def _printed_by(command: list[str]) -> list[str]:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout.splitlines()


def test_steps_of_one_shape_allocate_nothing(control: Control, gpu: Device, program: Program) -> None:
    cache = gpu.allocate((8,), F32)

    def step() -> None:
        (result,) = program.submit("accumulate", [gpu.upload(np.ones(8, np.float32)), cache]).wait()
        gpu.download(result)

    def allocations() -> dict[str, int]:
        calls = control.report().calls
        return {name: calls.get(name, 0) for name in ("hipMalloc", "hipFree", "hipHostMalloc", "hipHostFree")}

    def allocates_nothing() -> bool:
        before = allocations()
        for _ in range(5):
            step()
        return allocations() == before

    # On a busy machine a step may begin before the driver's own thread has freed what the one before used.
    assert any(allocates_nothing() for _ in range(10))


def test_spare_memory_is_the_chosen_gpus_own(control: Control, gpu: Device, runtime: Runtime) -> None:
    with closing(open_device("hip", runtime, device_ids=["0"])) as other:
        before = gpu.spare_bytes(), other.spare_bytes()
        kept = gpu.allocate((256 << 20,), np.dtype(np.int8))
        after = gpu.spare_bytes(), other.spare_bytes()
    assert before[0] is not None
    assert after == (before[0] - (256 << 20), before[1])
    assert kept.shape == (256 << 20,)


def test_a_buffer_on_the_host_is_read_without_asking_the_device(
    control: Control, gpu: Device, program: Program
) -> None:
    total = gpu.allocate((8,), F32, on_host=True)
    np.testing.assert_array_equal(gpu.download(total), np.zeros(8, np.float32))
    pending = [program.submit("accumulate", [gpu.upload(np.full(8, i, np.float32)), total]) for i in range(5)]
    for each in pending:
        each.wait()
    before = copies_and_waits(control)
    np.testing.assert_array_equal(gpu.download(total), np.full(8, 26, np.float32))  # 2 * 11 + 4
    assert copies_and_waits(control) == before


def copies_and_waits(control: Control) -> dict[str, int]:
    """Calls of the driver that read memory or wait; its own threads make others at any time."""
    calls = control.report().calls
    return {name: count for name, count in calls.items() if "Memcpy" in name or "Synchronize" in name}


@needs_shortfin
def test_each_stage_has_its_gpu(control: Control, tmp_path: Path) -> None:
    vmfb = compile_for_hip(STAGES, tmp_path / "stages.vmfb", ASYNC, num_devices=2)
    device = open_device("hip", "shortfin", device_ids=["0", "1"])
    program = device.load_program(vmfb, [], "stages")
    used = [state.used_bytes for state in control.report().devices]
    slabs = [device.allocate((1 << 20,), F32, stage=stage) for stage in (0, 1)]
    grown = [state.used_bytes for state in control.report().devices]
    assert [after - before for before, after in zip(used, grown, strict=True)] == [4 << 20, 4 << 20]
    caches = [device.allocate((8,), F32, stage=stage) for stage in (0, 1)]
    second = np.zeros(8, np.float32)
    pending = [program.submit("step", [device.upload(np.full(8, i, np.float32)), *caches]) for i in range(5)]
    for i, step in enumerate(pending):
        second = 2 * second + i
        np.testing.assert_array_equal(device.download(step.wait()[0]), second + i)
    np.testing.assert_array_equal(device.download(caches[1]), second)
    device.clear(caches[1], [2])
    np.testing.assert_array_equal(np.flatnonzero(device.download(caches[1]) == 0), [2])
    del slabs
    device.close()


@pytest.mark.parametrize("runtime", [SHORTFIN], indirect=True)
def test_refused_invocations_harm_nothing_until_there_were_too_many(gpu: Device, program: Program) -> None:
    cache = gpu.allocate((8,), F32)
    for done in range(1, 9):
        with pytest.raises(InvocationError, match=r"mismatch|INVALID_ARGUMENT"):
            program.submit("accumulate", [gpu.upload(np.zeros(3, np.int64)), cache]).wait()
        program.submit("accumulate", [gpu.upload(np.ones(8, np.float32)), cache]).wait()
        np.testing.assert_array_equal(gpu.download(cache), np.full(8, 2.0**done - 1))
    for _ in range(3):
        with pytest.raises(InvocationError, match=r"mismatch|INVALID_ARGUMENT|failed too often"):
            program.submit("accumulate", [gpu.upload(np.zeros(3, np.int64)), cache]).wait()
    with pytest.raises(InvocationError, match="failed too often to go on; restart the server"):
        program.submit("accumulate", [gpu.upload(np.ones(8, np.float32)), cache]).wait()


def test_close_waits_for_a_stalled_gpu(control: Control, hip_artefacts: Path, runtime: Runtime) -> None:
    """With invocations in flight and more queued behind them."""
    device = open_device("hip", runtime, device_ids=["1"])
    program = device.load_program(hip_artefacts / "fenced.vmfb", [hip_artefacts / "model.irpa"], "m")
    cache = device.allocate((8,), F32)
    pending: list[Pending] = []

    def submit_and_close() -> None:
        for _ in range(4):  # on iree.runtime, the first waits for the device
            pending.append(program.submit("accumulate", [device.upload(np.ones(8, np.float32)), cache]))
        device.close()

    control.command("stall 1")
    thread = threading.Thread(target=submit_and_close)
    thread.start()
    control.command("resume 1")
    thread.join()
    for step in pending:
        step.wait()
    assert len(pending) == 4


@pytest.mark.timeout(240)
@pytest.mark.parametrize("close", ["close", "leave"])
@pytest.mark.parametrize(
    "fault", ["fail hipModuleLaunchKernel 1 1", "fail hipModuleLaunchKernel 1 719", "fail hipMemcpyAsync 1 1"]
)
def test_a_gpu_that_failed_says_so_for_good(
    hip_artefacts: Path, runtime: Runtime, fault: str, close: str
) -> None:
    first, *others = run_failing(hip_artefacts, runtime, fault, close, EmulatedGpu())
    assert first == "done"
    assert others[-4:] == [others[-1]] * 4
    assert others[-1].startswith("the device has failed for good; restart the server, then retry (")
    # On a busy machine the driver may only tell that what came before was given up.
    assert "HIP driver error" in others[-1] or "ABORTED" in others[-1]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("close", ["close", "leave"])
def test_a_gpu_without_memory_says_what_to_do(hip_artefacts: Path, runtime: Runtime, close: str) -> None:
    """The driver does not always tell why it failed."""
    steps = run_failing(hip_artefacts, runtime, "forget", close, EmulatedGpu(memory_bytes=1 << 30))
    assert steps[:2] == ["done"] * 2
    assert steps[2:] == [steps[2]] * 3
    assert "restart the server" in steps[2]
    assert ("fewer --pages" in steps[2]) == ("RESOURCE_EXHAUSTED" in steps[2])


def test_a_vmfb_for_another_chip_is_refused(gpu: Device, tmp_path: Path) -> None:
    vmfb = compile_for_hip(FENCED.replace("SIDE", "8"), tmp_path / "other.vmfb", ASYNC, chip="gfx1100")
    with pytest.raises(ArtifactError, match=r"compiled for gfx1100, .*HIP calls it .*gfx942.*; rebuild it"):
        gpu.load_program(vmfb, [], "m")


def test_gpus_are_opened_by_name(control: Control, runtime: Runtime) -> None:
    with pytest.raises(
        ArtifactError, match=r"no AMD GPU '2'; available are 0 \(GPU-.*\), 1 \(GPU-.*\)"
    ) as caught:
        open_device("hip", runtime, device_ids=["2"])
    name = str(caught.value).rpartition("(")[2].rstrip(")")
    used = control.report().devices[0].used_bytes
    device = open_device("hip", runtime, device_ids=[name])
    buffer = device.allocate((4 << 20,), F32)
    # What earlier tests left may be freed meanwhile, so that neither number is exact.
    after = control.report().devices
    assert after[0].used_bytes <= used
    assert after[1].used_bytes >= 16 << 20
    del buffer
    device.close()


def test_pipeline_stages_need_shortfin(control: Control) -> None:
    with pytest.raises(ArtifactError, match=r"give one of --device-ids, .* `--runtime shortfin`"):
        open_device("hip", "iree", device_ids=["0", "1"])


def test_arguments_are_copied_once(control: Control, hip_artefacts: Path) -> None:
    """On iree.runtime: when an invocation first needs them, also those that it is given twice."""
    device = open_device("hip", "iree")
    program = device.load_program(hip_artefacts / "fenced.vmfb", [hip_artefacts / "model.irpa"], "m")
    ones = device.upload(np.ones(8, np.float32))

    def copies_of_an_invocation() -> int:
        before = control.report().calls.get("hipMemcpyAsync", 0)
        program.submit("accumulate", [ones, ones]).wait()
        return control.report().calls.get("hipMemcpyAsync", 0) - before

    assert copies_of_an_invocation() == copies_of_an_invocation() + 1
    device.close()
