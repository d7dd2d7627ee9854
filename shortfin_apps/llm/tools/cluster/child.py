"""`python -m shortfin_apps.llm.tools.cluster.child PID MODULE WORD...`: runs MODULE until its parent ends.

The process requests SIGTERM from the kernel for when its parent, process PID, ends for any reason. Then it
runs `python -m MODULE WORD...`. Workers and smg drain at SIGTERM, so answers in progress are still completed.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # Linux, prctl(2)


def main(argv: Sequence[str]) -> None:
    parent_pid, module, *words = argv
    end_with(int(parent_pid))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def end_with(parent_pid: int) -> None:
    """Request SIGTERM for when the process `parent_pid` ends; exit if it has already ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # the parent ended before the prctl, so no SIGTERM will come
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1:])
