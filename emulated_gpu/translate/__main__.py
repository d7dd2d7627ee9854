"""`python -m emulated_gpu.translate CODE_OBJECT PROGRAM` translates a code object to a program file."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from emulated_gpu.translate.kernel import translate
from emulated_gpu.translate.program import KernelProgram, pack
from shortfin_apps.llm.gpu_code.code_object import read_code_object


def inventory(kernels: list[KernelProgram]) -> Counter[str]:
    """How often these kernels name each operation."""
    return Counter(record.operation for each in kernels for record in each.records)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m emulated_gpu.translate", description=__doc__)
    parser.add_argument("code_object", type=Path)
    parser.add_argument("program", type=Path, nargs="?", help="the program file to write")
    parser.add_argument("--inventory", action="store_true", help="print the operations, most frequent first")
    parser.add_argument("--missing", action="store_true", help="print only what could not be translated")
    arguments = parser.parse_args()
    kernels = translate(read_code_object(arguments.code_object.read_bytes()))
    if arguments.program is not None:
        arguments.program.write_bytes(pack(kernels))
    for name, count in inventory(kernels).most_common():
        if arguments.inventory or (arguments.missing and name.startswith("unknown:")):
            print(name, count)


if __name__ == "__main__":
    main()
