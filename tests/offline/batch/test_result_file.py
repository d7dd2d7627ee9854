"""A file of results against a brute-force model, with crashes at every byte."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.offline.batch.errors import BatchFileError
from shortfin_apps.llm.offline.batch.result_file import ResultFile
from tests.offline.batch.batches import ids_in, result

IDS = ("a", "b\n", "é", "d" * 50)


def whole_lines(content: bytes) -> int:
    return content.count(b"\n")


def go_on(path: Path, ids: Sequence[str], stop_after: int | None = None) -> list[str]:
    """A run of a batch of `ids`: what it finds finished; appends the others, or `stop_after` of them."""
    with closing(ResultFile.open(path)) as file:
        finished = [each.custom_id for each in file.finished()]
        left = [each for each in ids if each not in finished]
        for custom_id in left[:stop_after]:
            file.append(result(custom_id).line)
    return finished


@pytest.mark.parametrize("zeros", [0, 1, 4096])
def test_after_a_crash_at_any_byte_nothing_is_lost_and_nothing_twice(tmp_path: Path, zeros: int) -> None:
    """Zeros are what a machine may leave behind in place of what was not synced."""
    path = tmp_path / "out.jsonl"
    whole = b"".join(result(custom_id).line for custom_id in IDS)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut] + bytes(zeros))
        assert go_on(path, IDS) == list(IDS[: whole_lines(whole[:cut])])
        assert ids_in(path) == list(IDS)


@given(data=st.data())
def test_any_number_of_crashes_costs_no_more_than_what_was_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("results") / "out.jsonl"
    ids = data.draw(st.lists(st.text(min_size=1, max_size=8), unique=True, min_size=1, max_size=12))
    known = b""  # the model: what is on the disk
    for stop_after in data.draw(st.lists(st.integers(0, 12), max_size=5)):
        finished = go_on(path, ids, stop_after)
        assert len(finished) == whole_lines(known)
        content = path.read_bytes()
        assert content.startswith(known[: known.rfind(b"\n") + 1])
        cut = data.draw(st.integers(known.rfind(b"\n") + 1, len(content)))
        torn = b"\0" * data.draw(st.integers(0, 3)) + data.draw(st.sampled_from([b"", b"\n", b'{"a"\n']))
        known = content[:cut]
        path.write_bytes(known + (torn if torn.startswith(b"\0") else b""))
    go_on(path, ids)
    assert sorted(ids_in(path)) == sorted(ids)


def test_a_line_of_another_program_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    content = result("a").line + b"notes of mine\n" + result("b").line
    path.write_bytes(content)
    with pytest.raises(BatchFileError, match=r"line 2 of .* is not the result of a request"):
        go_on(path, ["a", "b"])
    assert path.read_bytes() == content


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    """The limit on a file's size stands for it: the kernel writes what fits, and refuses the rest."""
    path = tmp_path / "out.jsonl"
    lines = [result(custom_id).line for custom_id in IDS]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(lines[0]) + 10, before[1]))
    try:
        with closing(ResultFile.open(path)) as file:
            file.append(lines[0])
            with pytest.raises(BatchFileError, match=r"cannot write .*File too large"):
                file.append(lines[1])
            with pytest.raises(BatchFileError, match="ends in a part of a line"):
                file.append(lines[2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == lines[0]
    go_on(path, IDS)
    assert ids_in(path) == list(IDS)


def test_a_device_without_room_is_named(tmp_path: Path) -> None:
    full = ResultFile(Path("/dev/full"), os.open("/dev/full", os.O_WRONLY))
    with (
        closing(full),
        pytest.raises(BatchFileError, match="cannot write /dev/full: No space left on device"),
    ):
        full.append(b"x\n")


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with closing(ResultFile.open(path)), pytest.raises(BatchFileError, match="another batch writes"):
        ResultFile.open(path)
    ResultFile.open(path).close()


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none" / "out", "No such file or directory"),
        (tmp_path / "file" / "out", "Not a directory"),
        (tmp_path / "pipe", "is not a regular file"),
        (Path("/proc/out"), "cannot write /proc/out"),  # a directory in which nobody may write
    ):
        with pytest.raises(BatchFileError, match=reason):
            ResultFile.open(path)


def test_clearing_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"x")
    with closing(ResultFile.open(path)) as file:
        assert not file.is_empty
        file.clear()
        assert file.is_empty
