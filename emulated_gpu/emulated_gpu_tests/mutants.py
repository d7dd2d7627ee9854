"""Changes one token of an operation's source at a time, and sees whether its tests notice.

    python -m emulated_gpu_tests.mutants --count 20 --seed 1 [FILE...]

FILE is a file of emulated_gpu/wave; by default all files of operations are taken. For each mutant the library
is built anew and `emulated_gpu_tests/wave/test_FILE.py` is run with it. A mutant that does not compile is not
counted. Some mutants that survive compute the same; those that do not are missing tests.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from emulated_gpu.library import SOURCES, compile_library

ROOT = Path(__file__).parents[1]
WAVE = SOURCES / "wave"
TESTS = Path(__file__).parent / "wave"
# The replacement of each token; longer tokens come before their prefixes.
REPLACEMENTS = {
    "<<": ">>",
    ">>": "<<",
    "<=": "<",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "&&": "||",
    "||": "&&",
    " + ": " - ",
    " - ": " + ",
    " * ": " + ",
    " & ": " | ",
    " | ": " & ",
    " ^ ": " | ",
    " < ": " <= ",
    " > ": " >= ",
    "~": "",
    "fmin": "fmax",
    "fmax": "fmin",
}
TOKEN = re.compile("|".join(re.escape(token) for token in REPLACEMENTS) + r"|\b\d+\b")
# Not mutated: comments, text, the preprocessor, loops over lanes and rows of operation tables.
PASSED_OVER = re.compile(
    r'//[^\n]*|"[^"\n]*"|^\s*#[^\n]*|for \([^)]*\)|\bFOR_LANES\(\w+\)|LANES == 64', re.MULTILINE
)


@dataclass(frozen=True)
class Mutant:
    """One replacement in a file of emulated_gpu/wave."""

    path: Path
    line: int
    start: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}: {self.old.strip()} -> {self.new.strip() or 'nothing'}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file, in the order of the text."""
    text = path.read_text()
    passed_over = [match.span() for match in PASSED_OVER.finditer(text)]
    for match in TOKEN.finditer(text):
        if any(start <= match.start() < end for start, end in passed_over):
            continue
        old = match.group()
        new = REPLACEMENTS.get(old) if not old.isdecimal() else str(int(old) + 1)
        assert new is not None
        yield Mutant(path, text.count("\n", 0, match.start()) + 1, match.start(), old, new)


def is_noticed(mutant: Mutant, timeout_s: int) -> bool | None:
    """Whether the file's tests fail, or do not end; None if the mutant does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "emulated_gpu"
        shutil.copytree(SOURCES, sources)
        changed = sources / mutant.path.relative_to(SOURCES)
        text = mutant.path.read_text()
        changed.write_text(text[: mutant.start] + mutant.new + text[mutant.start + len(mutant.old) :])
        try:
            library = compile_library(sources, Path(folder) / "library")
        except subprocess.CalledProcessError:
            return None
        return not tests_pass(mutant.path.stem, library, timeout_s)


def tests_pass(name: str, library: Path, timeout_s: int) -> bool:
    """Runs the tests of one file of operations on a library."""
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:randomly", "-p", "no:cacheprovider"]
    environment = os.environ | {"EMULATED_GPU_LIBRARY": str(library)}
    try:
        done = subprocess.run(
            [*command, str(TESTS / f"test_{name}.py")],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="as in vector_integer; default: all with tests"
    )
    parser.add_argument("--count", type=int, default=20, help="mutants of each file (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which of them (default: %(default)s)")
    parser.add_argument("--timeout", type=int, default=120, metavar="S", help="of a run of the tests")
    options = parser.parse_args(arguments)
    names = options.files or sorted(p.stem.removeprefix("test_") for p in TESTS.glob("test_*.py"))
    for name in names:
        path = WAVE / f"{name}.c"
        if path.exists():
            _report(path, options.count, options.seed, options.timeout)
    return 0


def _report(path: Path, count: int, seed: int, timeout_s: int) -> None:
    candidates = list(mutants_of(path))
    chosen = random.Random(seed).sample(candidates, min(count, len(candidates)))
    results = [(mutant, is_noticed(mutant, timeout_s)) for mutant in chosen]
    compiled = [noticed for _, noticed in results if noticed is not None]
    print(f"{path.name}: {sum(compiled)} of {len(compiled)} noticed", flush=True)
    for mutant, noticed in results:
        if noticed is False:
            print(f"  survived: {mutant}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
