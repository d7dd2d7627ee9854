"""Includes and imports point one way, and nothing of another package of this repository is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from emulated_gpu.library import SOURCES

INCLUDE = re.compile(r'^#include "(.*)"', re.MULTILINE)


def name_of(path: Path) -> str:
    """A source and its header are one; a package is its folder."""
    path = path.resolve().relative_to(SOURCES).with_suffix("")
    return (path.parent if path.name == "__init__" else path).as_posix()


def c_sources() -> Mapping[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for path in (each for folder in ("hip", "wave") for each in (SOURCES / folder).glob("*.[ch]")):
        included = {name_of(path.parent / name) for name in INCLUDE.findall(path.read_text())}
        graph.setdefault(name_of(path), set()).update(included - {name_of(path)})
    return graph


def imported_by(path: Path) -> set[str]:
    """Absolute names of modules, with each name taken from them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def python_modules() -> Mapping[str, set[str]]:
    return {
        name_of(path): {
            name.removeprefix("emulated_gpu.").replace(".", "/")
            for name in imported_by(path)
            if name.startswith("emulated_gpu.")
        }
        for path in SOURCES.rglob("*.py")
    }


@pytest.mark.parametrize("graph", [c_sources(), python_modules()], ids=["c", "python"])
def test_there_is_no_circle(graph: Mapping[str, set[str]]) -> None:
    assert len(graph) > 20
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_the_executor_of_waves_needs_no_hip() -> None:
    for name, included in c_sources().items():
        assert not (name.startswith("wave/") and any(each.startswith("hip/") for each in included))


def test_it_imports_nothing_of_shortfin_llm() -> None:
    for path in SOURCES.rglob("*.py"):
        assert not [name for name in imported_by(path) if name.startswith(("shortfin", "tests"))], path
