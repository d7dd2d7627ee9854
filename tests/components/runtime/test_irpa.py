from __future__ import annotations

import struct
from pathlib import Path

import pytest

from shortfin_apps.llm.builder.weights.archive import ArchiveEntry, write_archive
from shortfin_apps.llm.components.runtime.irpa import check_archive
from shortfin_apps.llm.components.runtime.parameters import open_parameters
from shortfin_apps.llm.errors import ArtifactError

# Where the header and its first entry keep numbers that say how far to read.
FIELDS = {"header size": 8, "next header": 16, "entries": 32, "table": 40, "names": 56, "storage": 72}
FIRST_ENTRY = {"size": 96, "name": 116, "name length": 124, "metadata": 132, "data": 156, "data length": 164}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "model.irpa"
    write_archive(path, [ArchiveEntry("a", 8), ArchiveEntry("bb", 100)], [bytes(8), bytes(100)])
    return path


def test_a_whole_archive_passes(archive: Path) -> None:
    check_archive(archive)
    assert len(open_parameters([archive])) == 2


@pytest.mark.parametrize("offset", [*FIELDS.values(), *FIRST_ENTRY.values()])
@pytest.mark.parametrize("value", [2**64 - 1, 2**63, 10**6])
def test_a_number_that_leads_out_of_the_file_is_refused(archive: Path, offset: int, value: int) -> None:
    """IREE's parser follows some of these out of the map, which kills the process."""
    content = bytearray(archive.read_bytes())
    struct.pack_into("<Q", content, offset, value)
    archive.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"model\.irpa: "):
        open_parameters([archive])
