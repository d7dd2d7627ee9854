"""Runs a compiled function on more workers than there are CPUs, so that they wait for one another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PROGRAM = """\
import sys
import iree.runtime as iree
import numpy as np
from shortfin_apps.llm.contract.host_cpu import permit_amx
vmfb, file, function, calls = sys.argv[1:]
permit_amx()
iree.flags.parse_flags("--task_topology_group_count=16")
config = iree.Config("local-task")
module = iree.load_vm_module(iree.VmModule.mmap(config.vm_instance, vmfb), config)
arrays = np.load(file)
arguments = [arrays[name] for name in arrays if name.startswith("argument")]
expected = [arrays[name] for name in arrays if name.startswith("expected")]
for _ in range(int(calls)):
    for result, value in zip(module[function](*arguments), expected, strict=True):
        np.testing.assert_array_equal(result.to_host(), value)
"""
Arrays = Sequence[npt.NDArray[Any]]


def check_in_a_crowd(
    vmfb: Path, function: str, arguments: Arrays, expected: Arrays, folder: Path, *, calls: int
) -> None:
    """In a process of its own, as the runtime reads the number of workers once."""
    arrays: dict[str, Any] = {f"argument{i}": value for i, value in enumerate(arguments)}
    arrays |= {f"expected{i}": value for i, value in enumerate(expected)}
    np.savez(folder / "arrays.npz", **arrays)
    command = [sys.executable, "-c", PROGRAM, str(vmfb), str(folder / "arrays.npz"), function, str(calls)]
    subprocess.run(command, check=True, timeout=120)
