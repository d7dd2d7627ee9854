from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import pytest
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.builder.sources.gguf_header import read_scalars
from shortfin_apps.llm.contract.errors import BuildError
from tests.builder.model_files import write_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


def test_reads_what_the_library_reads(whole: Path) -> None:
    fields = GGUFReader(whole).fields
    single = {k: v.contents() for k, v in fields.items() if len(v.types) == 1 and not k.startswith("GGUF.")}
    assert read_scalars(whole) == pytest.approx(single)
    assert single.keys() > {"general.architecture", "tokenizer.ggml.model"}


@given(data=st.data())
def test_damage_is_a_build_error_or_read(whole: Path, data: st.DataObject) -> None:
    content = bytearray(whole.read_bytes()[:4096])
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = whole.with_name("damaged.gguf")
    damaged.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with suppress(BuildError):  # and nothing else
        read_scalars(damaged)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"none\.gguf"):
        read_scalars(tmp_path / "none.gguf")


def test_arrays_in_arrays_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.gguf"
    key = struct.pack("<Q1sI", 1, b"a", 9)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + key + struct.pack("<IQ", 9, 1) * 10_000)
    with pytest.raises(BuildError, match=r"deep\.gguf: not a readable GGUF file"):
        read_scalars(path)


def test_a_value_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"a", 99))
    with pytest.raises(BuildError, match="a value has type 99"):
        read_scalars(path)
