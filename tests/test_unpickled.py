"""The package uses nothing that executes code from data, such as pickle."""

from __future__ import annotations

import re

import pytest

from tests.test_imports import SOURCES, imported

RUNS_CODE = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch"}
CALLS = re.compile(r"allow_pickle|yaml\.(?:unsafe_|full_)?load\(|\beval\(|(?<!\.)\bexec\(|shell=True")


def dangers(source: str) -> set[str]:
    modules = {name.partition(".")[0] for name in imported(source)}
    return (modules & RUNS_CODE) | set(CALLS.findall(source))


def test_no_module_unpickles_or_evaluates_input() -> None:
    found = {module: dangers(source) for module, source in SOURCES.items()}
    assert {module: patterns for module, patterns in found.items() if patterns} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import joblib",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "yaml.unsafe_load(text)",
        "eval(text)",
        "exec(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_each_pattern_is_found(source: str) -> None:
    assert dangers(source)
