from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.peers.cache import Cache, SetUpError


def test_a_step_runs_once_until_its_inputs_change(tmp_path: Path) -> None:
    said: list[str] = []
    taken: list[str] = []
    for what in ("one", "one", "two"):
        Cache(tmp_path, said.append).once("thing", what, lambda what=what: taken.append(what))  # type: ignore[misc]
    assert taken == ["one", "two"]
    assert said == ["thing: one", "thing: two"]


def test_a_failed_step_runs_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path, lambda _: None)

    def fail() -> None:
        raise SetUpError("no")

    with pytest.raises(SetUpError):
        cache.once("thing", "one", fail)
    taken: list[str] = []
    cache.once("thing", "one", lambda: taken.append("again"))
    assert taken == ["again"]


def test_a_failing_command_is_named_with_its_output(tmp_path: Path) -> None:
    cache = Cache(tmp_path, lambda _: None)
    with pytest.raises(SetUpError, match=r"exit 3.*job\.log"):
        cache.run("job", [sys.executable, "-c", "print('why'); raise SystemExit(3)"])
    assert (tmp_path / "logs" / "job.log").read_text(encoding="utf-8") == "why\n"
    cache.run("job", [sys.executable, "-c", "import os; print(os.environ['WHAT'])"], {"WHAT": "more"})
    assert (tmp_path / "logs" / "job.log").read_text(encoding="utf-8") == "why\nmore\n"
