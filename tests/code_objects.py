"""Code objects of `random:tiny` for tests, and LLVM's disassembler as a second opinion on them."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from emulated_gpu.machine_code.code_object import read_code_object
from shortfin_apps.llm.contract.gpu_code.code_object import code_objects_in
from shortfin_apps.llm.model.spec import BuildOptions
from tests.conftest import BuildTiny

CHIPS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
# LLVM 19 is the first that knows gfx1201; it does not know gfx950.
DISASSEMBLED = ("gfx90a", "gfx942", "gfx1100", "gfx1201")

_LINE = re.compile(r"\t(\S+)[ \t]*(.*?)\s*// ([0-9A-F]{12}): ((?:[0-9A-F]{8} ?)+)")
_ENCODINGS = re.compile(r"(_e32|_e64|_dpp|_sdwa)+$")


@dataclass(frozen=True)
class Line:
    """An instruction as LLVM prints it, without a suffix of its encoding."""

    mnemonic: str
    operands: str
    words: int


def options_of(chip: str) -> BuildOptions:
    """All entries for the chips that other tests build too, few for the others."""
    if chip in ("gfx942", "gfx1100"):
        return BuildOptions(device=f"hip:{chip}")
    return BuildOptions(device=f"hip:{chip}", prefill_batch_sizes=(1,), decode_batch_sizes=(4,))


def tiny_code_objects(build_tiny: BuildTiny, chip: str) -> list[bytes]:
    """Those of `random:tiny`: one of IREE's own kernels, and one for each that Triton compiled."""
    return list(code_objects_in(build_tiny(options_of(chip)).vmfb.read_bytes()))


def largest_code_object(build_tiny: BuildTiny, chip: str) -> bytes:
    """The one with the most kernels, and of those with one the largest."""
    return max(
        tiny_code_objects(build_tiny, chip),
        key=lambda image: (len(read_code_object(image).kernels), len(image)),
    )


def disassembled(code_object: bytes, folder: Path) -> dict[int, Line]:
    """LLVM's disassembly by address, without what LLVM 19 does not know of what Triton emits.

    Skips the test where LLVM 19 or later is not installed.
    """
    path = folder / "code.co"
    path.write_bytes(code_object)
    text = subprocess.run([_objdump(), "-d", path], capture_output=True, text=True, check=True).stdout
    return {
        int(address, 16): Line(_ENCODINGS.sub("", mnemonic), operands, len(words.split()))
        for mnemonic, operands, address, words in _LINE.findall(text)
        if mnemonic != ".long"
    }


@cache
def _objdump() -> str:
    for name in ("llvm-objdump", *(f"llvm-objdump-{version}" for version in range(19, 30))):
        path = shutil.which(name)
        if path and _version(path) >= 19:
            return path
    pytest.skip("llvm-objdump of LLVM 19 or later is not installed")


def _version(path: str) -> int:
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"LLVM version (\d+)", text)
    return int(found[1]) if found and "amdgcn" in text else 0
