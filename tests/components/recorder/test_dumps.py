from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shortfin_apps.llm.components.recorder.dump_file import DumpError, read_dump
from shortfin_apps.llm.components.recorder.dumps import (
    INTERVAL_S,
    NUM_KEPT,
    Dumps,
    default_directory,
)
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder
from shortfin_apps.llm.components.recorder.records import Header
from tests.components.stepped_engine import SteppedClock

HEADER = Header(model="m", device="fake", num_pages=32, num_window_pages=0, stride=4)


def dumps_in(directory: Path | None, clock: Callable[[], float] = lambda: 0.0) -> Dumps:
    return Dumps(FlightRecorder(), directory, HEADER, clock=clock, start=lambda work: work())


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def test_a_dump_is_its_owners_alone_and_says_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = dumps_in(tmp_path / "a" / "b").write("somebody asked")
    assert read_dump(written.path).header.reason == "somebody asked"
    assert written.num_bytes == written.path.stat().st_size
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert stat.S_IMODE(written.path.stat().st_mode) == 0o600
    assert f"shortfin-llm replay-dump {written.path} DIR" in caplog.text
    assert "token ids of users' requests" in caplog.text


def test_a_failing_device_does_not_fill_a_disk(tmp_path: Path) -> None:
    clock = SteppedClock()
    dumps = dumps_in(tmp_path, clock)
    for _ in range(100):
        dumps.write_soon("it failed again")
    assert len(files(tmp_path)) == 1
    clock.now_s += INTERVAL_S
    dumps.write_soon("and again")
    assert len(files(tmp_path)) == 2


def test_the_last_dump_is_written_although_another_was_just_before(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    dumps = Dumps(recorder, tmp_path, HEADER, start=lambda work: work())
    dumps.write_soon("a row of NaN")
    recorder.draw("sample_bs4", {}, 3)
    last = dumps.write_last("the engine is lost")
    assert last is not None
    assert (last.entry, last.rows, last.state) == ("sample_bs4", 3, "running")
    assert [read_dump(path).header.reason for path in files(tmp_path)] == [
        "a row of NaN",
        "the engine is lost",
    ]
    assert read_dump(files(tmp_path)[-1]).header.last_launch is not None


def test_the_last_dump_is_not_written_twice(tmp_path: Path) -> None:
    """It waits for the automatic one, which may have to wait for a disk."""
    started: list[Callable[[], None]] = []
    recorder = FlightRecorder()
    dumps = Dumps(recorder, tmp_path, HEADER, start=started.append)
    recorder.draw("sample_bs4", {}, 3)
    dumps.write_soon("an invocation failed")
    ending = threading.Thread(target=dumps.write_last, args=("the engine is lost",))
    ending.start()
    assert ending.is_alive()
    started[0]()
    ending.join(30)
    assert [read_dump(path).header.reason for path in files(tmp_path)] == ["an invocation failed"]


def test_an_automatic_dump_without_a_thread_is_written_last(tmp_path: Path) -> None:
    def start(work: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    recorder = FlightRecorder()
    dumps = Dumps(recorder, tmp_path, HEADER, start=start)
    recorder.draw("sample_bs4", {}, 3)
    dumps.write_soon("an invocation failed")
    dumps.write_last("the engine is lost")
    assert len(files(tmp_path)) == 1


def test_few_are_kept_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    dumps = dumps_in(tmp_path)
    names = [dumps.write("asked").path for _ in range(NUM_KEPT + 3)]
    assert set(files(tmp_path)) == {tmp_path / "mine", *names[-NUM_KEPT:]}


def test_a_directory_that_cannot_be_made_is_logged_and_hurts_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    dumps = dumps_in(tmp_path / "file" / "dumps")
    dumps.write_soon("it failed")
    assert "it failed, but no dump can be written" in caplog.text
    with pytest.raises(DumpError, match="--dump-dir"):
        dumps.write("asked")


def test_a_chosen_directory_that_cannot_be_used_is_reported_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    Dumps(FlightRecorder(), tmp_path / "file" / "dumps", HEADER).check()
    assert "no dump can be written there (Not a directory); choose another --dump-dir" in caplog.text
    caplog.clear()
    Dumps(FlightRecorder(), tmp_path / "new" / "dumps", HEADER).check()
    Dumps(FlightRecorder(), None, HEADER).check()
    assert caplog.text == ""
    assert list((tmp_path / "new" / "dumps").iterdir()) == []


def test_a_thread_that_cannot_be_started_hurts_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def no_thread(work: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    recorder = FlightRecorder()
    Dumps(recorder, tmp_path, HEADER, start=no_thread)
    recorder.on_fault("it failed")
    assert "can't start new thread" in caplog.text


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    (disk / "filler").write_bytes(bytes(4096))
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_logged_and_leaves_no_part(full_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    dumps = dumps_in(full_disk)
    (full_disk / "filler").write_bytes(bytes(8192))
    dumps.write_soon("it failed")
    assert "No space left" in caplog.text
    assert files(full_disk) == [full_disk / "filler"]


@pytest.mark.parametrize("kind", ["open", "link"])
def test_the_default_directory_must_be_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its name is known: another user may have made it, or a link to somewhere else."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = default_directory()
    assert directory == tmp_path / f"shortfin-llm-dumps-{os.getuid()}"
    if kind == "open":
        directory.mkdir()
        directory.chmod(0o777)
    else:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DumpError, match="this user's alone"):
        dumps_in(None).write("asked")


def test_the_default_directory_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    written = dumps_in(None).write("asked")
    assert stat.S_IMODE(written.path.parent.stat().st_mode) == 0o700


def test_a_fault_is_dumped_with_what_was_recorded_by_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    recorder, waiting = FlightRecorder(), list[Callable[[], None]]()
    Dumps(recorder, tmp_path, HEADER, start=waiting.append)
    recorder.clear([1], [])
    recorder.on_fault("it failed")
    recorder.clear([2], [])
    [work] = waiting
    work()
    [path] = files(tmp_path)
    assert len(read_dump(path).recording.records) == 1
