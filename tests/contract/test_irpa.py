from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import iree.runtime as iree
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.components.runtime.parameters import open_parameters
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.irpa import ArchiveEntry, check_archive, write_archive

# Where the header and its first entry keep numbers that say how far to read.
FIELDS = {"header size": 8, "next header": 16, "entries": 32, "table": 40, "names": 56, "storage": 72}
FIRST_ENTRY = {"size": 96, "name": 116, "name length": 124, "metadata": 132, "data": 156, "data length": 164}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "model.irpa"
    write_archive(path, [ArchiveEntry("a", 8), ArchiveEntry("bb", 100)], [bytes(8), bytes(100)])
    return path


def test_an_intact_archive_passes(archive: Path) -> None:
    check_archive(archive)
    assert len(open_parameters([archive])) == 2


@pytest.mark.parametrize("offset", [*FIELDS.values(), *FIRST_ENTRY.values()])
@pytest.mark.parametrize("value", [2**64 - 1, 2**63, 10**6])
def test_an_offset_outside_the_file_is_refused(archive: Path, offset: int, value: int) -> None:
    """IREE's parser would follow some of these outside of the mapped file, which kills the process."""
    content = bytearray(archive.read_bytes())
    struct.pack_into("<Q", content, offset, value)
    archive.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"model\.irpa: "):
        open_parameters([archive])


def read_archive(path: Path) -> dict[str, bytes]:
    """Reads with IREE's own reader."""
    index = iree.ParameterIndex()
    index.load(str(path))
    return {name: bytes(entry.file_view) for name, entry in index.items()}


@settings(max_examples=30, deadline=None)
@given(
    contents=st.dictionaries(st.text(min_size=1, max_size=8), st.binary(min_size=1, max_size=200), min_size=1)
)
def test_iree_reads_what_is_written(
    tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes]
) -> None:
    path = tmp_path_factory.mktemp("archive") / "x.irpa"
    entries = [ArchiveEntry(name, len(content)) for name, content in contents.items()]
    write_archive(path, entries, contents.values())
    assert read_archive(path) == contents


def test_a_parameter_may_come_in_pieces(tmp_path: Path) -> None:
    pieces = [b"a", b"bc", b"", b"defg"]
    write_archive(tmp_path / "x.irpa", [ArchiveEntry("first", 3), ArchiveEntry("second", 4)], pieces)
    assert read_archive(tmp_path / "x.irpa") == {"first": b"abc", "second": b"defg"}


@pytest.mark.parametrize("pieces", [[b"abcde"], [b"ab", b"cd", b"e"]])
def test_pieces_end_where_a_parameter_does(tmp_path: Path, pieces: list[bytes]) -> None:
    with pytest.raises(AssertionError):
        write_archive(tmp_path / "x.irpa", [ArchiveEntry("first", 4)], pieces)


def test_one_parameter_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Contents are a stream: each is written before the next is made."""
    path = tmp_path / "x.irpa"
    sizes: list[int] = []

    def contents() -> Iterator[bytes]:
        for _ in range(3):
            yield bytes(1 << 20)
            sizes.append(path.stat().st_size)

    write_archive(path, [ArchiveEntry(str(i), 1 << 20) for i in range(3)], contents())
    assert sizes[0] >= 1 << 20
    assert sizes == sorted(sizes)
