from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest
from filelock import FileLock

from shortfin_apps.llm.builder.cache import BuildCache, clone, content_key, user_cache


def make_file(folder: Path) -> None:
    (folder / "x").write_text("made")


def must_not_run(folder: Path) -> None:
    raise AssertionError("it is cached")


@pytest.fixture
def cache(tmp_path: Path) -> BuildCache:
    return BuildCache(tmp_path / "cache")


def test_makes_once(cache: BuildCache, tmp_path: Path) -> None:
    first = cache.get_or_make("kind", "key", make_file)
    second = cache.get_or_make("kind", "key", must_not_run)
    assert first == second
    assert first.files["x"].size_bytes == 4
    second.place("x", tmp_path / "y")
    assert (tmp_path / "y").read_text() == "made"


def test_files_are_read_only(cache: BuildCache) -> None:
    entry = cache.get_or_make("kind", "key", make_file)
    assert (entry.directory / "x").stat().st_mode & 0o222 == 0


def test_a_placed_file_is_independent_of_the_cache(cache: BuildCache, tmp_path: Path) -> None:
    entry = cache.get_or_make("kind", "key", make_file)
    entry.place("x", tmp_path / "y")
    (tmp_path / "y").write_text("spoilt")
    assert (entry.directory / "x").read_text() == "made"
    assert (entry.directory / "x").stat().st_nlink == 1


def test_a_temporary_cache_moves_its_files(tmp_path: Path) -> None:
    entry = BuildCache(tmp_path / "cache", temporary=True).get_or_make("kind", "key", make_file)
    entry.place("x", tmp_path / "y")
    assert (tmp_path / "y").read_text() == "made"
    assert not (entry.directory / "x").exists()


def test_a_clone_is_copy_on_write_or_unsupported(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(100_000))
    if not clone(tmp_path / "x", tmp_path / "y"):
        pytest.skip("the file system of the tests' folder does not share blocks between files")
    assert (tmp_path / "y").read_bytes() == bytes(100_000)


@pytest.mark.parametrize("damage", ["shorter", "other", "gone", "listing"])
def test_rebuilds_damaged_entries(cache: BuildCache, damage: str) -> None:
    folder = cache.get_or_make("kind", "key", make_file).directory
    for path in folder.iterdir():
        path.chmod(0o644)
    if damage == "shorter":
        (folder / "x").write_text("mad")
    elif damage == "other":
        (folder / "x").write_text("mads")
    elif damage == "gone":
        (folder / "x").unlink()
    else:
        (folder / "entry.json").write_text("{")
    entry = cache.get_or_make("kind", "key", make_file)
    assert (entry.directory / "x").read_text() == "made"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupt_leaves_no_partial_entry(
    cache: BuildCache, tmp_path: Path, error: type[BaseException]
) -> None:
    def stop(folder: Path) -> None:
        make_file(folder)
        raise error

    with pytest.raises(error):
        cache.get_or_make("kind", "key", stop)
    assert [p.name for p in (tmp_path / "cache" / "kind").iterdir() if p.suffix != ".lock"] == []
    cache.get_or_make("kind", "key", make_file)


def test_sweep_removes_leftovers_but_not_entries_being_made(tmp_path: Path) -> None:
    kind = tmp_path / "kind"
    for name in ("dead", "alive"):
        (kind / f"{name}.partial").mkdir(parents=True)
        make_file(kind / f"{name}.partial")
    with FileLock(kind / "alive.lock"):
        BuildCache(tmp_path).sweep()
    assert sorted(p.name for p in kind.glob("*.partial")) == ["alive.partial"]


def test_user_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_CACHE", str(tmp_path))
    assert user_cache() == tmp_path
    monkeypatch.delenv("SHORTFIN_LLM_CACHE")
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / name)
    assert user_cache() == tmp_path / "shortfin-llm"


def test_keys_differ_when_their_parts_do() -> None:
    assert content_key("a", 1) == content_key("a", 1)
    assert len({content_key("a", 1), content_key("a", "1"), content_key("a1")}) == 3
