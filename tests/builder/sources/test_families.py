"""Every family from both kinds of source, against the logits of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from tests.builder.golden_families import MODELS, POSITIONS, PROMPT, GoldenFamily, stored_weights
from tests.builder.reference import forward

# What GGUF files of a family cannot say.
NOT_IN_GGUF = ("llama-yarn-not-truncated", "llama3")


@pytest.mark.parametrize("name", MODELS)
def test_a_directory_has_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    family = GoldenFamily.of(name)
    source = HfDirectorySource(family.write_hf(tmp_path))
    logits = forward(source.spec, stored_weights(source), PROMPT)[np.array(POSITIONS) - 1]
    np.testing.assert_allclose(logits, family.logits, rtol=1e-4, atol=1e-4 * np.abs(family.logits).max())


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_IN_GGUF])
def test_a_gguf_file_is_the_same_model(tmp_path: Path, name: str) -> None:
    family = GoldenFamily.of(name)
    directory = HfDirectorySource(family.write_hf(tmp_path))
    file = GgufSource(family.write_gguf(tmp_path / "model.gguf"))
    rounded = replace(file.spec, rms_norm_eps=directory.spec.rms_norm_eps, name=directory.spec.name)
    assert file.spec.rms_norm_eps == pytest.approx(directory.spec.rms_norm_eps)
    assert rounded == directory.spec
    expected = stored_weights(directory)
    for weight, values in stored_weights(file).items():
        np.testing.assert_array_equal(values, expected.pop(weight), err_msg=weight)
    assert not expected
