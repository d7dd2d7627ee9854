from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm import cli
from shortfin_apps.llm.builder.builder import build
from shortfin_apps.llm.builder.cache import BUILD, DOWNLOADS, SERVED, BuildCache, Use
from shortfin_apps.llm.builder.cache_contents import DAY_S, Held, contents, remove, to_remove
from shortfin_apps.llm.model.spec import BuildOptions


def held(size: int, last_use: float) -> Held:
    path = Path(f"{last_use}")
    return Held(path=path, lock=path, kind="weights", source="s", device="cpu", size=size, last_use=last_use)


def fill(root: Path, key: str, size: int, last_use: float) -> Path:
    """An entry of the build cache."""
    cache = BuildCache(root / BUILD)
    entry = cache.get_or_make(
        "weights", key, lambda folder: _write(folder / "w", size), Use(f"hf:org/{key}", "cpu")
    )
    os.utime(entry.directory / "use.json", (last_use, last_use))
    return entry.directory


def _write(path: Path, size: int) -> None:
    path.write_bytes(bytes(size))


@given(
    sizes=st.lists(st.integers(0, 100), max_size=8),
    days=st.none() | st.integers(0, 8),
    most=st.none() | st.integers(0, 400),
)
def test_what_stays_is_new_and_small_enough(sizes: list[int], days: int | None, most: int | None) -> None:
    now = 100.0 * DAY_S
    everything = [held(size, now - age * DAY_S) for age, size in enumerate(sizes)]
    removed = to_remove(everything, now, days, most)
    kept = [one for one in everything if one not in removed]
    if days is not None:
        assert all(now - one.last_use <= days * DAY_S for one in kept)
    if most is not None:
        assert sum(one.size for one in kept) <= most
    if days is None and most is None:
        assert not removed


def test_every_kind_is_listed_with_its_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_CACHE", str(tmp_path))
    out = tmp_path / SERVED / "random-tiny"
    build("random:tiny", out, BuildOptions(prefill_batch_sizes=(1,), decode_batch_sizes=(1,)))
    (tmp_path / DOWNLOADS / "llm-1.0").mkdir(parents=True)
    found = {(one.kind, one.source, one.device) for one in contents(tmp_path)}
    assert found == {
        ("model", "random:tiny", "cpu"),
        ("weights", "random:tiny", "cpu"),
        ("program", "random:tiny", "cpu"),
        ("self-test", "random:tiny", "cpu"),
        ("download", "llm-1.0", ""),
    }
    assert all(one.size > 0 for one in contents(tmp_path) if one.kind != "download")


def test_prune_removes_what_is_old_unless_a_build_works_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_CACHE", str(tmp_path))
    old, busy, new = (fill(tmp_path, key, 2_000_000, use) for key, use in (("a", 0), ("b", 0), ("c", 4e9)))
    with FileLock(busy.with_name("b.lock")):
        assert cli.main(["prune", "--older-than", "30", "--dry-run"]) == 0
        assert "would free 4.0 MB" in capsys.readouterr().out
        assert old.exists()
        assert cli.main(["prune", "--older-than", "30"]) == 0
    printed = capsys.readouterr().out
    assert "hf:org/a" in printed
    assert "hf:org/b" not in printed
    assert "freed 2.0 MB\n1 in use by a build\n" in printed
    assert [path.exists() for path in (old, busy, new)] == [False, True, True]
    assert cli.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert "hf:org/c  cpu     2.0 MB" in listed


def test_kernels_are_listed_together_and_removed_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_CACHE", str(tmp_path))
    now = time.time()
    for chip, name, days in (("gfx942", "a", 50), ("gfx942", "b", 0), ("gfx942", "c", 40), ("sm_90", "a", 0)):
        path = BuildCache(tmp_path / BUILD).kernels / chip / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, 1_000_000)
        os.utime(path, (now - days * DAY_S,) * 2)
    assert cli.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"kernels +Triton +gfx942 +3\.0 MB", listed)
    assert re.search(r"kernels +Triton +sm_90 +1\.0 MB", listed)
    assert "4.0 MB in " in listed
    assert cli.main(["prune", "--older-than", "30"]) == 0
    assert "freed 2.0 MB" in capsys.readouterr().out
    assert {one.path.name for one in contents(tmp_path) if one.device == "gfx942"} == {"b"}


def test_prune_needs_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prune"]) == 2
    assert "--older-than DAYS, --max-size GB or both" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "x"])
def test_prune_refuses_other_than_amounts(value: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["prune", f"--max-size={value}"])


def test_an_entry_without_a_use_is_listed_and_removed(tmp_path: Path) -> None:
    directory = fill(tmp_path, "a", 1, 0)
    (directory / "use.json").unlink()
    [one] = contents(tmp_path)
    assert one.source == "?"
    assert remove(one)
    assert not contents(tmp_path)
