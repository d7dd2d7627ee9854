"""`python -m emulated_gpu.translate CODE_OBJECT PROGRAM` translates a code object to a program file.

With `--serve`, it does so for every pair of lines of its standard input that name the two files.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import BinaryIO

from emulated_gpu.machine_code.code_object import read_code_object
from emulated_gpu.translate.kernel import translate
from emulated_gpu.translate.program import KernelProgram, pack


def inventory(kernels: list[KernelProgram]) -> Counter[str]:
    """Count the records of each operation in the kernels."""
    return Counter(record.operation for each in kernels for record in each.records)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Translate code objects until the input ends.

    A request is two lines: the path of a code object, and the path of the program file to write. The answer
    is one line: 0 for success, 1 for failure.
    """
    while code_object := requests.readline():
        program = requests.readline()
        try:
            _path(program).write_bytes(pack(_translated(_path(code_object))))
            answers.write(b"0\n")
        except Exception:
            traceback.print_exc()
            answers.write(b"1\n")
        answers.flush()


def _translated(code_object: Path) -> list[KernelProgram]:
    return translate(read_code_object(code_object.read_bytes()))


def _path(line: bytes) -> Path:
    return Path(os.fsdecode(line.rstrip(b"\n")))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m emulated_gpu.translate", description=__doc__)
    parser.add_argument("code_object", type=Path, nargs="?")
    parser.add_argument("program", type=Path, nargs="?", help="the program file to write")
    parser.add_argument("--serve", action="store_true", help="translate what standard input names")
    parser.add_argument("--inventory", action="store_true", help="print the operations, most frequent first")
    parser.add_argument("--missing", action="store_true", help="print only what could not be translated")
    arguments = parser.parse_args()
    if arguments.serve:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the requesting process
        serve(sys.stdin.buffer, sys.stdout.buffer)
        return
    if arguments.code_object is None:
        parser.error("which code object?")
    kernels = _translated(arguments.code_object)
    if arguments.program is not None:
        arguments.program.write_bytes(pack(kernels))
    for name, count in inventory(kernels).most_common():
        if arguments.inventory or (arguments.missing and name.startswith("unknown:")):
            print(name, count)


if __name__ == "__main__":
    main()
