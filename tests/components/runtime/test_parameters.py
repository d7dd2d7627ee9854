from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import iree.runtime as iree
import numpy as np
import pytest

from shortfin_apps.llm.components.runtime.parameters import (
    embedding_rows,
    parameter_bytes,
    read_parameters,
    stream_parameters,
)
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.irpa import ArchiveEntry, write_archive


def test_sizes_are_those_of_all_files(tmp_path: Path) -> None:
    first, second = tmp_path / "first.irpa", tmp_path / "second.irpa"
    write_archive(first, [ArchiveEntry("a", 3), ArchiveEntry("b", 65)], [bytes(3), bytes(65)])
    write_archive(second, [ArchiveEntry("c", 1)], [bytes(1)])
    assert parameter_bytes([first, second]) == {"a": 3, "b": 65, "c": 1}


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.irpa").write_bytes(b"nothing of the kind")
    with pytest.raises(ArtifactError, match=r"bad\.irpa"):
        parameter_bytes([tmp_path / "bad.irpa"])


def content(entry: Any) -> bytes:
    """The bytes of an entry that is in memory, or in a file that is not mapped."""
    handle, offset = entry.file_storage
    return bytes(entry.file_view) if handle.is_host_allocation else os.pread(handle.fd, entry.length, offset)


ways = pytest.mark.parametrize("read", [read_parameters, stream_parameters])


@ways
def test_contents_are_read_completely(tmp_path: Path, read: Callable[[Sequence[Path]], Any]) -> None:
    first, second = tmp_path / "first.irpa", tmp_path / "second.irpa"
    large = bytes(range(256)) * 20_000  # more than a huge page
    write_archive(first, [ArchiveEntry("a", 3), ArchiveEntry("b", len(large))], [b"abc", large])
    write_archive(second, [ArchiveEntry("c", 1)], [b"z"])
    index = read([first, second])
    contents = {entry.key: content(entry) for entry in (index[i] for i in range(len(index)))}
    assert contents == {"a": b"abc", "b": large, "c": b"z"}


@ways
def test_a_splat_stays_a_splat(tmp_path: Path, read: Callable[[Sequence[Path]], Any]) -> None:
    index = iree.ParameterIndex()
    index.add_splat("s", b"\x01\x02", 64)
    index.create_archive_file(str(tmp_path / "splat.irpa"))
    entry = read([tmp_path / "splat.irpa"])[0]
    assert (entry.key, entry.is_splat, entry.splat_pattern, entry.length) == ("s", True, b"\x01\x02", 64)


def test_streamed_files_are_not_mapped_and_stay_open(tmp_path: Path) -> None:
    path = tmp_path / "a.irpa"
    write_archive(path, [ArchiveEntry("a", 3)], [b"abc"])
    index = stream_parameters([path])
    assert str(path) not in Path("/proc/self/maps").read_text()
    path.unlink()
    assert content(index[0]) == b"abc"


@pytest.mark.parametrize("read", [read_parameters, stream_parameters, parameter_bytes])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, read: Callable[[Sequence[Path]], Any]) -> None:
    with pytest.raises(ArtifactError, match=r"gone\.irpa: cannot be read"):
        read([tmp_path / "gone.irpa"])


@pytest.mark.parametrize(
    ("metadata", "rows"),
    [
        ('PYTORCH:{"type": "Tensor", "dtype": "float16", "shape": [97, 8]}', 97),
        ('TENSORv0:{"type": "Tensor", "dtype": "float16", "shape": [97, 8]}', 97),
        ('PYTORCH:{"type": "Tensor", "dtype": "float16", "shape": [776]}', None),
        ('PYTORCH:{"shape": 97}', None),
        ("PYTORCH:[]", None),
        ("", None),
        ("no JSON", None),
    ],
)
def test_the_embedding_shape_is_read_from_its_metadata(
    tmp_path: Path, metadata: str, rows: int | None
) -> None:
    index = iree.ParameterIndex()
    index.add_buffer("output_norm.weight", np.zeros(8, np.uint8), metadata='PYTORCH:{"shape": [3, 4]}')
    index.add_buffer("token_embd.weight", np.zeros(97 * 16, np.uint8), metadata=metadata)
    index.create_archive_file(str(tmp_path / "shark.irpa"))
    assert embedding_rows([tmp_path / "shark.irpa"]) == rows


def test_shapes_written_by_iree_are_read(tmp_path: Path) -> None:
    index = iree.ParameterIndex()
    iree.parameter_index_add_numpy_ndarray(index, "token_embd.weight", np.zeros((97, 8), np.float16))
    index.create_archive_file(str(tmp_path / "theirs.irpa"))
    assert embedding_rows([tmp_path / "theirs.irpa"]) == 97
