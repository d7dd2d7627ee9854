"""Runs a command on the emulated GPU: `python -m emulated_gpu --chip gfx942 -- COMMAND...`.

Without a command, it prints the environment variables for a shell: `eval "$(python -m emulated_gpu)"`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from emulated_gpu.chips import CHIPS
from emulated_gpu.errors import EmulatedGpuError
from emulated_gpu.library import EmulatedGpu


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m emulated_gpu", description=__doc__)
    parser.add_argument("--chip", choices=CHIPS, default="gfx942", help="default: gfx942")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="how many (default: 1)")
    parser.add_argument("--memory", type=int, default=4 << 30, metavar="BYTES", help="of each device")
    parser.add_argument("--order", choices=("random", "late"), default="random", help="of work in streams")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random order")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="where findings and counters go, as JSON lines"
    )
    parser.add_argument("--log", action="store_true", help="print the calls of HIP")
    parser.add_argument("command", nargs="*", help="and its arguments, after --")
    options = parser.parse_args()
    gpu = EmulatedGpu(
        chip=options.chip,
        devices=options.devices,
        memory_bytes=options.memory,
        order=options.order,
        seed=options.seed,
        report=options.report.absolute() if options.report else None,
        logs_calls=options.log,
    )
    try:
        variables = gpu.environment()
        folders = variables["IREE_HIP_DYLIB_PATH"], os.environ.get("LD_LIBRARY_PATH")
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
        if options.command:
            os.execvpe(options.command[0], options.command, os.environ | variables)
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
    except (EmulatedGpuError, OSError) as error:
        sys.exit(f"emulated_gpu: {error}")


if __name__ == "__main__":
    main()
