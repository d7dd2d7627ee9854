"""PTX assembled for Hopper by the assembler in Triton's package."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import compile_kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel


def spilled_bytes(text: str, folder: Path) -> set[int]:
    """The numbers of bytes that the assembler reports as spilled: only 0 if all fits into registers."""
    (folder / "kernel.ptx").write_text(text)
    command = ["-arch=sm_90a", "-v", str(folder / "kernel.ptx"), "-o", str(folder / "kernel.cubin")]
    return set(map(int, re.findall(r"(\d+) bytes spill", _run("ptxas", command))))


def overwritten_operands(text: str, folder: Path) -> set[str]:
    """The instructions that write to a register while a matrix instruction may still read it."""
    spilled_bytes(text, folder)
    lines = _run("nvdisasm", ["-c", str(folder / "kernel.cubin")]).splitlines()
    found, at_label = set[str](), dict[str, set[int]]()
    for _ in range(3):  # what runs at a branch also runs at its label, which may be further up
        read = set[int]()
        for line in lines:
            if label := re.match(r"(\.L_x_\d+):", line):
                read = read | at_label.get(label[1], set())
            match = re.search(r"\*/\s+(@!?\w+ )?([\w.]+) (.*?);", line)
            condition, name, operands = match.groups() if match else ("", "", "")
            registers = [int(each) for each in re.findall(r"\bR(\d+)", operands)]
            if name.startswith("HGMMA"):
                read = read | set(range(registers[1], registers[1] + 4))
            elif name.startswith("WARPGROUP.DEPBAR"):  # waits for all of them
                read = set()
            elif name == "BRA":
                target = re.findall(r"\.L_x_\d+", operands)[-1]
                at_label[target] = at_label.get(target, set()) | read
                read = read if condition else set()
            elif re.match(r"R\d", operands):
                width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
                if read & set(range(registers[0], registers[0] + width)):
                    found.add(line.strip())
    return found


def _run(program: str, arguments: list[str]) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / program
    run = subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True)
    return run.stdout + run.stderr


def text_with_loads_by_tma(kernel: Kernel, maps: int) -> str:
    """Compile a matmul for Hopper; return its PTX, once it can be launched and has its tensor maps."""
    code = compile_kernel(kernel, "nvptx", "sm_90")
    text = code.image.decode()
    assert ".version 8.4" in text
    assert code.threads == 384  # two groups that multiply, and one with the loads, of 4 warps each
    assert code.shared_bytes <= 227 << 10
    parameters = len(kernel.interface.buffers) + len(kernel.interface.constants)
    assert text[text.index(".entry") : text.index(")", text.index(".entry"))].count(".param") == parameters
    _expect_fences(text, maps)
    return text


def _expect_fences(text: str, maps: int) -> None:
    """Each tensor map is written, and then read by the TMA unit after a fence."""
    written = [match.start() for match in re.finditer(r"tensormap\.cp_fenceproxy\S*release\.gpu", text)]
    fences = [match.start() for match in re.finditer(r"fence\.proxy\.tensormap::generic\.acquire\.gpu", text)]
    assert len(written) == len(fences) == maps
    places = [place for pair in zip(written, fences, strict=True) for place in pair]
    assert places == sorted(places)
    assert places[-1] < text.index("cp.async.bulk.tensor")
