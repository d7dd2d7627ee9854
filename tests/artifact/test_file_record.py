from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.artifact import file_record
from shortfin_apps.llm.artifact.file_record import BLOCK_BYTES, FileRecord, record, wrong_files, wrong_sizes


def test_records_size_and_hash(tmp_path: Path) -> None:
    content = bytes(BLOCK_BYTES) + b"x"
    (tmp_path / "a").write_bytes(content)
    expected = FileRecord(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
    assert record(tmp_path / "a") == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(min_size=1, max_size=64), data=st.data())
def test_any_changed_byte_is_found(tmp_path: Path, content: bytes, data: st.DataObject) -> None:
    (tmp_path / "same").write_bytes(content)
    (tmp_path / "other").write_bytes(content)
    files = {name: record(tmp_path / name) for name in ("same", "other")}
    at = data.draw(st.integers(0, len(content) - 1))
    changed = bytes([content[at] ^ data.draw(st.integers(1, 255))])
    (tmp_path / "other").write_bytes(content[:at] + changed + content[at + 1 :])
    assert wrong_sizes(tmp_path, files) == {}
    assert wrong_files(tmp_path, files) == {"other": "has another content (its SHA-256 differs)"}


def test_sizes_are_compared_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    files = {name: FileRecord(sha256="", size_bytes=4) for name in ("short", "gone")}
    read: list[int] = []
    wrong = wrong_files(tmp_path, files, read.append)
    assert wrong == {"short": "has 3 bytes instead of 4", "gone": "is missing"}
    assert read == []


def test_reports_the_bytes_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(BLOCK_BYTES + 5))
    read: list[int] = []
    assert wrong_files(tmp_path, {"a": record(tmp_path / "a")}, read.append) == {}
    assert read == [BLOCK_BYTES, 5]


def test_an_interrupt_ends_the_reading(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(8 * BLOCK_BYTES))
    files = {"a": record(tmp_path / "a")}
    read: list[int] = []

    def interrupt(count: int) -> None:
        read.append(count)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wrong_files(tmp_path, files, interrupt)
    assert len(read) == 1


@pytest.mark.timeout(60)
def test_an_interrupt_ends_the_reading_of_the_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()

    class Stop(threading.Event):
        def set(self) -> None:
            super().set()
            stopped.set()

    def advance(count: int) -> None:
        read.append(count)
        if len(read) == 2:  # both files have begun
            begun.set()
        begun.wait()
        if threading.current_thread() not in first:
            stopped.wait(5)
            return
        raise KeyboardInterrupt

    def read_first(*arguments: Any) -> str | None:
        if arguments[0] == tmp_path / "a":
            first.append(threading.current_thread())
        return read_content(*arguments)

    first: list[threading.Thread] = []
    read_content = file_record._wrong_content
    monkeypatch.setattr(file_record, "_wrong_content", read_first)
    monkeypatch.setattr(file_record, "Event", Stop)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    begun = threading.Event()
    read: list[int] = []
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(8 * BLOCK_BYTES))
    with pytest.raises(KeyboardInterrupt):
        wrong_files(tmp_path, {name: record(tmp_path / name) for name in "ab"}, advance)
    assert len(read) == 2
