"""Plants one mistake at a time in the package, and says whether `make test` would notice.

    python -m tests.mutants --count 60 --seed 1 [FOLDER...]

FOLDER is one of shortfin_apps/llm; by default components, serving/api, artifact and builder/lowering. Mutants
are drawn from the folders and the kinds of mistake in turn. For each one, the tests that mirror its file run,
then its folder's, then all that `make test` runs, until one fails. A mutant that survives either computes the
same, or is a missing test.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = Path("shortfin_apps/llm")
FOLDERS = ("components", "serving/api", "artifact", "builder/lowering")
SELECTION = ["-m", "not (slow or emulated or by_hand)"]
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
RELEASES = {
    "release",
    "close",
    "cancel",
    "clear",
    "discard",
    "pop",
    "remove",
    "abort",
    "unlink",
    "free",
    "set",
}


@dataclass(frozen=True)
class Mutant:
    """A node of a file and the mistake that takes its place."""

    path: Path  # below ROOT
    kind: str
    old: ast.expr | ast.stmt
    new: ast.expr | ast.stmt

    def __str__(self) -> str:
        before, after = (ast.unparse(each).replace("\n", " ")[:60] for each in (self.old, self.new))
        return f"{self.path.relative_to(PACKAGE)}:{self.old.lineno}: {self.kind}: {before} -> {after}"

    def source(self) -> str:
        """The text of the file with the mistake in it; the other lines stay as they are."""
        lines = (ROOT / self.path).read_text(encoding="utf-8").splitlines(keepends=True)
        assert self.old.end_lineno is not None
        assert self.old.end_col_offset is not None
        first, last = lines[self.old.lineno - 1].encode(), lines[self.old.end_lineno - 1].encode()
        head, tail = first[: self.old.col_offset].decode(), last[self.old.end_col_offset :].decode()
        new = ast.unparse(self.new)
        text = new if isinstance(self.new, ast.stmt) else f"({new})"
        return "".join([*lines[: self.old.lineno - 1], head, text, tail, *lines[self.old.end_lineno :]])


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        new = deepcopy(node)
        match node, new:
            case ast.Compare(ops=[op]), ast.Compare() if type(op) in COMPARISONS:
                new.ops = [COMPARISONS[type(op)]()]
                yield Mutant(path, "wrong comparison", node, new)
            case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(value=int(number))), ast.BinOp():
                new.right = ast.Constant(number + 1)
                yield Mutant(path, "off by one", node, new)
            case ast.Await(), ast.Await():
                yield Mutant(path, "dropped await", node, node.value)
            case ast.Call(func=function, args=[ast.Name(), ast.Name(), *_]), ast.Call() if (
                ast.unparse(function) != "isinstance"  # never survives
            ):
                new.args[0], new.args[1] = new.args[1], new.args[0]
                yield Mutant(path, "swapped arguments", node, new)
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))), _ if name in RELEASES:
                yield Mutant(path, "missing release", node, ast.Pass())


def drawn(folders: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """So many mutants, of the folders and the kinds in turn."""
    rng = random.Random(seed)
    kinds: dict[tuple[str, str], list[Mutant]] = {}
    for folder in folders:
        for path in sorted((ROOT / PACKAGE / folder).rglob("*.py")):
            for mutant in mutants_of(path.relative_to(ROOT)):
                kinds.setdefault((mutant.kind, folder), []).append(mutant)
    for mutants in kinds.values():
        rng.shuffle(mutants)
    chosen: list[Mutant] = []
    for key in cycle(sorted(kinds)):
        if len(chosen) == count or not any(kinds.values()):
            return chosen
        if kinds[key]:
            chosen.append(kinds[key].pop())
    return chosen


def tests_for(path: Path) -> list[list[str]]:
    """What to run in turn: the mirrored file, the folder where it is or would be, and all."""
    inner = path.relative_to(PACKAGE)
    folder = next(Path("tests", each) for each in inner.parents if (ROOT / "tests" / each).exists())
    mirrored = Path("tests", inner.parent, f"test_{inner.name}")
    files = [[str(mirrored)]] if (ROOT / mirrored).exists() else []
    return [*files, [str(folder)], []]


def is_noticed(mutant: Mutant, timeout_s: int) -> str | None:
    """The tests that fail, or do not end; None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", copy], cwd=ROOT, check=True)
        try:
            (copy / mutant.path).write_text(mutant.source(), encoding="utf-8")
            for paths in tests_for(mutant.path):
                if not tests_pass(copy, paths, timeout_s):
                    return " ".join(paths) or "all"
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", copy], cwd=ROOT, check=True)
    return None


def tests_pass(copy: Path, paths: Sequence[str], timeout_s: int) -> bool:
    """Runs tests of a copy of the project, in two processes."""
    options = ["-qx", "-p", "no:randomly", "-p", "no:cacheprovider", "--benchmark-disable"]
    several = [] if paths and paths[0].endswith(".py") else ["-n", "2", "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", *options, *several, *SELECTION, *paths]
    environment = os.environ | {"PYTHONPATH": str(copy), "CI": "true"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode in (0, 5)  # 5: no test was selected


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER", default=FOLDERS)
    parser.add_argument("--count", type=int, default=60, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which of them (default: %(default)s)")
    parser.add_argument("--timeout", type=int, default=900, metavar="S", help="of a run of tests")
    options = parser.parse_args(arguments)
    outcomes: Counter[str] = Counter()
    for mutant in drawn(options.folders, options.count, options.seed):
        found = is_noticed(mutant, options.timeout)
        outcomes["noticed" if found else "SURVIVED"] += 1
        print(f"{'noticed by ' + found if found else 'SURVIVED'}: {mutant}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
