"""Findings of emulated_gpu, if the device is emulated: it sees faults that leave results right."""

from __future__ import annotations

from pathlib import Path

from shortfin_apps.llm.components.runtime.memory import HIP, loaded_library
from shortfin_apps.llm.tools.qualify.bench import Bench
from shortfin_apps.llm.tools.qualify.outcome import Failed, Fault, Passed, Skipped


def findings(bench: Bench) -> Passed:
    assert bench.device is not None  # opened, which loads the driver's library
    if not bench.is_emulated:
        raise Skipped("the device is not emulated")
    from emulated_gpu.control import Control

    library = loaded_library(HIP)
    assert library is not None, "it is emulated"
    report = Control(Path(library._name)).report()
    for finding in report.findings:
        where = f"{finding.instruction} at {finding.code_address:#x}"
        fault = Fault.MISSING_WAIT if finding.kind == "missing_wait" else Fault.EMULATOR
        raise Failed(fault, f"{finding.kind} in {finding.kernel}: {where}")
    for misuse in report.misuses:
        raise Failed(Fault.EMULATOR, f"{misuse.what}: {misuse.text}")
    launches = sum(kernel.launches for kernel in report.kernels.values())
    return Passed(f"{launches:,} launches of {len(report.kernels)} kernels, without findings")
