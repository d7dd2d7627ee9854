from __future__ import annotations

from pathlib import Path

import pytest

from shortfin_apps.llm.build.weights_archive import ArchiveEntry, write_archive
from shortfin_apps.llm.components.runtime.parameters import parameter_bytes
from shortfin_apps.llm.errors import ArtifactError


def test_sizes_are_those_of_all_files(tmp_path: Path) -> None:
    first, second = tmp_path / "first.irpa", tmp_path / "second.irpa"
    write_archive(first, [ArchiveEntry("a", 3), ArchiveEntry("b", 65)], [bytes(3), bytes(65)])
    write_archive(second, [ArchiveEntry("c", 1)], [bytes(1)])
    assert parameter_bytes([first, second]) == {"a": 3, "b": 65, "c": 1}


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.irpa").write_bytes(b"nothing of the kind")
    with pytest.raises(ArtifactError, match=r"bad\.irpa"):
        parameter_bytes([tmp_path / "bad.irpa"])
