"""PTX assembled for Hopper by the assembler in Triton's package."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path


def spilled_bytes(text: str, folder: Path) -> set[int]:
    """The numbers of bytes that the assembler reports as spilled: only 0 if all fits into registers."""
    import triton

    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    (folder / "kernel.ptx").write_text(text)
    command = [str(assembler), "-arch=sm_90a", "-v", str(folder / "kernel.ptx"), "-o", "/dev/null"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(map(int, re.findall(r"(\d+) bytes spill", run.stdout + run.stderr)))
