"""Files with bytes changed, removed or inserted give a typed error or a model, and nothing else.

A length in a damaged file may be any number, so the readers' memory use is checked, too.
"""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.artifact.artifact import Artifact, Manifest
from shortfin_apps.llm.builder.sources.base import ModelSource
from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.components.runtime.parameters import open_parameters
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.model.spec import tensor_shapes
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from tests.builder.model_files import write_gguf, write_hf

MOST_MEMORY_KIB = 512 * 1024  # for files of some hundred kilobytes
HEAD_BYTES = 2048  # where a format keeps its counts and lengths
MESSAGES = [{"role": "user", "content": "hello"}]

damages = st.lists(
    st.tuples(
        st.sampled_from(["change", "change", "insert", "delete", "cut"]),
        st.floats(0, 1, exclude_max=True),  # where, in the head or in the whole
        st.booleans(),
        st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, b"\0" * 8, b"{[{[", b"9" * 8]),
    ),
    min_size=1,
    max_size=3,
)


def damaged(content: bytes, damage: list[tuple[str, float, bool, bytes]]) -> bytes:
    for kind, where, in_head, new in damage:
        at = int(where * (min(len(content), HEAD_BYTES) if in_head else len(content)))
        end = {"change": at + len(new), "insert": at, "delete": at + len(new), "cut": len(content)}[kind]
        content = content[:at] + (new if kind in ("change", "insert") else b"") + content[end:]
    return content


def read_source(source: ModelSource) -> None:
    source.tokenizer_files()
    for name in tensor_shapes(source.spec):
        source.tensor(name)


def read_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer.load(path)
    tokenizer.decode(tokenizer.encode("hello"))
    tokenizer.apply_chat_template(MESSAGES)


# The file to damage in the folder made by `folder`, and its reader.
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "gguf": ("tiny.gguf", lambda path: read_source(GgufSource(path))),
    "safetensors": ("hf/model.safetensors", lambda path: read_source(HfDirectorySource(path.parent))),
    "hf config": ("hf/config.json", lambda path: read_source(HfDirectorySource(path.parent))),
    "irpa": ("artefact/model.irpa", lambda path: open_parameters([path])),
    "config": ("artefact/config.json", ModelConfig.load),
    "manifest": ("artefact/manifest.json", Manifest.load),
    "tokenizer": ("artefact/tokenizer.json", read_tokenizer),
    "tokenizer config": (
        "artefact/tokenizer_config.json",
        lambda path: read_tokenizer(path.with_name("tokenizer.json")),
    ),
    "generation config": (
        "artefact/generation_config.json",
        lambda path: read_tokenizer(path.with_name("tokenizer.json")),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_artifact: Artifact) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_gguf(folder / "tiny.gguf")
    write_hf(folder / "hf")
    shutil.copytree(tiny_artifact.vmfb.parent, folder / "artefact")
    for path in folder.rglob("*.*"):
        path.chmod(0o644)
    return folder


@pytest.fixture
def little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEMORY_KIB


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.usefixtures("little_memory")
@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
@given(damage=damages)
def test_damage_is_a_typed_error(
    kind: str, folder: Path, damage: list[tuple[str, float, bool, bytes]]
) -> None:
    name, read = READERS[kind]
    path = folder / name
    whole = path.read_bytes()
    # A new file instead of new bytes in the old one, which may still be mapped.
    path.unlink()
    path.write_bytes(damaged(whole, damage))
    try:
        read(path)
    except LlmError as error:
        message = str(error)
    else:
        message = "it was no harm"
    finally:
        path.unlink()
        path.write_bytes(whole)
    assert message
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["hf config", "config", "manifest", "tokenizer config", "generation config"])
@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"a":' * 100_000, f'{{"max_seq_len": {"9" * 5000}}}'], ids=["[", "{", "9"]
)
def test_json_that_python_does_not_take_is_a_typed_error(
    kind: str, content: str, folder: Path, tmp_path: Path
) -> None:
    name, read = READERS[kind]
    shutil.copytree((folder / name).parent, tmp_path / "copy")
    (tmp_path / "copy" / Path(name).name).write_text(content)
    with pytest.raises(LlmError, match=Path(name).name):
        read(tmp_path / "copy" / Path(name).name)


@pytest.mark.parametrize("kind", READERS)
def test_undamaged_files_are_read(kind: str, folder: Path) -> None:
    name, read = READERS[kind]
    read(folder / name)
