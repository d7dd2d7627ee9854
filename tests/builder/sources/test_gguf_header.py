from __future__ import annotations

import shutil
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.builder.sources.catalogue import first_look
from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.builder.sources.gguf_header import parts_of, read_gguf
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.source_name import source_name, whole_stem
from shortfin_apps.llm.model.spec import tensor_shapes
from tests.builder.gguf_edits import edited
from tests.builder.model_files import write_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


def test_reads_what_the_library_reads(whole: Path) -> None:
    library, ours = GGUFReader(whole), read_gguf(whole)
    keys = {k: v.contents() for k, v in library.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == keys
    assert keys.keys() > {"general.architecture", "tokenizer.ggml.tokens"}
    for tensor, expected in zip(ours.tensors, library.tensors, strict=True):
        assert (tensor.name, tensor.tensor_type) == (expected.name, expected.tensor_type)
        assert (tensor.data_offset, tensor.n_bytes) == (expected.data_offset, expected.n_bytes)
        np.testing.assert_array_equal(tensor.shape, expected.shape)
        np.testing.assert_array_equal(tensor.data, expected.data)
        assert tensor.data.dtype == expected.data.dtype


@given(data=st.data())
def test_damage_is_a_build_error_or_read(whole: Path, data: st.DataObject) -> None:
    content = bytearray(whole.read_bytes()[:4096])
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = whole.with_name("damaged.gguf")
    damaged.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with suppress(BuildError):  # and nothing else
        read_gguf(damaged)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"none\.gguf"):
        read_gguf(tmp_path / "none.gguf")


def test_arrays_in_arrays_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.gguf"
    key = struct.pack("<Q1sI", 1, b"a", 9)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + key + struct.pack("<IQ", 9, 1) * 10_000)
    with pytest.raises(BuildError, match=r"deep\.gguf: not a readable GGUF file"):
        read_gguf(path)


def test_a_value_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"a", 99))
    with pytest.raises(BuildError, match="a value has type 99"):
        read_gguf(path)


def write_parts(folder: Path, count: int, stem: str = "tiny") -> list[Path]:
    """random:tiny, cut as llama-gguf-split does: the first part has the metadata."""
    whole = GGUFReader(write_gguf(folder / "whole.gguf"))
    paths = [folder / f"{stem}-{number + 1:05}-of-{count:05}.gguf" for number in range(count)]
    for number, path in enumerate(paths):
        writer = GGUFWriter(path, "llama")
        if number == 0:
            _copy_metadata(whole, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        for tensor in whole.tensors[number::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    (folder / "whole.gguf").unlink()
    return paths


def _copy_metadata(whole: GGUFReader, writer: GGUFWriter) -> None:
    for key, field in whole.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind, *of_items = field.types
            writer.add_key_value(key, field.contents(), kind, of_items[-1] if of_items else None)


@pytest.mark.parametrize("given", [0, 2])
def test_any_part_stands_for_the_whole(tmp_path: Path, given: int) -> None:
    paths = write_parts(tmp_path, 3)
    first_look(str(paths[given]))
    source = GgufSource(paths[given])
    whole = GgufSource(write_gguf(tmp_path / "tiny.gguf"))
    assert source.spec == whole.spec
    assert source.tokenizer_files() == whole.tokenizer_files()
    for name in tensor_shapes(whole.spec):
        np.testing.assert_array_equal(source.tensor(name), whole.tensor(name))
    assert source_name(str(paths[given])) == "tiny"


def test_every_part_counts(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, 2)
    before = GgufSource(paths[0]).sha256
    with paths[1].open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\1")
    assert GgufSource(paths[0]).sha256 != before


def test_refuses_missing_parts(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, 3)
    paths[1].unlink()
    with pytest.raises(BuildError, match=r"00002-of-00003\.gguf: no such file; .* is one of 3 parts"):
        GgufSource(paths[0])


def test_refuses_parts_with_the_name_of_another(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, 2)
    shutil.copyfile(paths[0], paths[1])
    with pytest.raises(BuildError, match="is part 1 of 2, not 2 of 2 as in its name"):
        GgufSource(paths[0])
    alone = shutil.copyfile(paths[0], tmp_path / "tiny.gguf")
    with pytest.raises(BuildError, match="is part 1 of 2, not 1 of 1 as in its name"):
        GgufSource(alone)


def test_refuses_parts_with_the_same_tensor(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, 2)
    first = GGUFReader(paths[0]).tensors[0]
    edited(paths[1], tensors={first.name: np.array(first.data)})
    with pytest.raises(BuildError, match=r"its parts have 22 tensors, 21 of them different"):
        GgufSource(paths[0])


@pytest.mark.parametrize("key", ["split.no", "split.count"])
@pytest.mark.parametrize("value", ["1", 1.5, True])
def test_refuses_numbers_of_parts_of_another_type(tmp_path: Path, key: str, value: float | str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", file_keys={key: value})
    with pytest.raises(BuildError, match=f"`{key}` is not a whole number"):
        GgufSource(path)


def test_numbers_outside_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="is none of its 2 parts"):
        parts_of(tmp_path / "a-00003-of-00002.gguf")


def test_names_without_a_number_are_whole() -> None:
    assert parts_of(Path("a-Q4_K_M.gguf")) == [Path("a-Q4_K_M.gguf")]
    assert whole_stem("a-00001-of-00002") == "a"
    assert whole_stem("a-0001-of-0002") == "a-0001-of-0002"
