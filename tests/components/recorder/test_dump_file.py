"""Dumps are read as they were written; files that are none, or half of one, are told apart."""

from __future__ import annotations

import gzip
import stat
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.recorder import dump_file
from shortfin_apps.llm.components.recorder.dump_file import DumpError, read_dump, write_dump
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder, Recording
from shortfin_apps.llm.components.recorder.records import (
    FORMAT_VERSION,
    Header,
    KnownRequest,
    Run,
    Step,
    Task,
)
from tests.components.engine_fixture import PROMPT, call, make_rig

HEADER = Header(
    format_version=FORMAT_VERSION, reason="a test", written_s=2.0, epoch_s=0.0, num_pages=32, stride=4
)


def recorded() -> Recording:
    recorder = FlightRecorder()
    rig = make_rig(loop_sizes=(1, 8), recorder=recorder)
    for number in range(3):
        rig.engine.add(call(str(number), PROMPT, max_tokens=5))
    rig.run()
    return recorder.recording()


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("dumps") / "d"
    write_dump(path, HEADER, recorded())
    return path.read_bytes()


def plain(value: object) -> object:
    """Without the difference between lists and tuples."""
    return msgspec.json.decode(msgspec.json.encode(value))


def test_a_dump_is_read_as_it_was_written(tmp_path: Path) -> None:
    recording = recorded()
    assert write_dump(tmp_path / "d", HEADER, recording) == (tmp_path / "d").stat().st_size
    dump = read_dump(tmp_path / "d")
    assert dump.is_whole
    assert dump.header == HEADER
    assert plain(dump.recording[:3]) == plain(recording[:3])
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@given(data=st.data())
def test_a_dump_that_was_cut_off_is_read_up_to_there_or_refused(
    content: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("dumps") / "d"
    path.write_bytes(content)
    whole = read_dump(path)
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 9))])
    with suppress(DumpError):
        cut = read_dump(path)
        assert plain(cut.recording.records) == plain(whole.recording.records[: len(cut.recording.records)])
        assert not cut.is_whole or len(cut.recording.records) == len(whole.recording.records)


@given(data=st.data())
def test_a_damaged_dump_raises_nothing_else(
    content: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Of what is compressed, as gzip's own sums find most of the others."""
    lines = bytearray(gzip.decompress(content))
    for _ in range(data.draw(st.integers(1, 3))):
        lines[data.draw(st.integers(0, len(lines) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("dumps") / "d"
    path.write_bytes(gzip.compress(bytes(lines), 1))
    with suppress(DumpError):
        read_dump(path)


@pytest.mark.parametrize(
    "garbage",
    [b"", b"garbage", *map(gzip.compress, [b"", b"{}\n", b"[" * 99_999 + b"\n"])],
    ids=["nothing", "no gzip", "no line", "no header", "no end"],  # as gzip's bytes have the time in them
)
def test_what_is_no_dump_is_refused(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / "d").write_bytes(garbage)
    with pytest.raises(DumpError, match="d: "):
        read_dump(tmp_path / "d")


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="No such file"):
        read_dump(tmp_path / "none")


def test_a_dump_of_another_format_says_so(tmp_path: Path) -> None:
    header = msgspec.structs.replace(HEADER, format_version=99)
    write_dump(tmp_path / "d", header, Recording([], [], []))
    with pytest.raises(DumpError, match="format 99"):
        read_dump(tmp_path / "d")


def test_a_dump_that_unpacks_to_everything_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump_file, "MAX_LINE_BYTES", 1000)
    (tmp_path / "d").write_bytes(gzip.compress(b"x" * 5000))
    with pytest.raises(DumpError, match="line 1 has more"):
        read_dump(tmp_path / "d")
    monkeypatch.setattr(dump_file, "MAX_TOTAL_BYTES", 3000)
    requests = [KnownRequest(number, "r", 0.0, 1, (1,), (), None) for number in range(99)]
    write_dump(tmp_path / "e", HEADER, Recording(requests, [], []))
    with pytest.raises(DumpError, match="which no recorder keeps"):
        read_dump(tmp_path / "e")


def run_of(*tasks: Task) -> Run:
    return Run(number=1, began_s=0.0, entry="decode_bs1", family="decode", blocks=2, tasks=tasks)


@pytest.mark.parametrize(
    ("recording", "problem"),
    [
        (Recording([], [], [run_of(Task(5, 0, (1,)))]), "request 5"),
        (Recording([], [], [Step(number=1, began_s=0.0, entry="e", loop=3, index=0)]), "loop"),
        (Recording([KnownRequest(5, "r", 0.0, 1, (1,), (99,), None)], [], []), "page 99"),
        (Recording([KnownRequest(5, "r", 0.0, 1, (1,), (), None)], [], [run_of(Task(5, 0, ()))]), "tokens"),
    ],
)
def test_records_of_nothing_that_is_there_are_refused(
    tmp_path: Path, recording: Recording, problem: str
) -> None:
    write_dump(tmp_path / "d", HEADER, recording)
    with pytest.raises(DumpError, match=problem):
        read_dump(tmp_path / "d")
