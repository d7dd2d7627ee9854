from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.peers.cache import SetUpError
from bench.peers.perplexity import MAGIC, Scored, compare, read_logits, scored_columns
from shortfin_apps.llm.artifact.artifact import Artifact


def written(tokens: np.ndarray[Any, Any], steps: np.ndarray[Any, Any]) -> bytes:
    """A file of llama-perplexity: `tokens` [windows, length], `steps` [windows, scored, vocabulary]."""
    windows, length = tokens.shape
    vocabulary = steps.shape[2]
    rows = np.zeros((*steps.shape[:2], 4 + vocabulary + vocabulary % 2), np.uint16)
    rows[:, :, :4] = 65535  # two f32, which are not log-probabilities
    rows[:, :, 4 : 4 + vocabulary] = steps
    header = np.array([length, vocabulary, windows], np.int32)
    return MAGIC + header.tobytes() + tokens.astype(np.int32).tobytes() + rows.tobytes()


@pytest.mark.parametrize("vocabulary", [6, 7])
def test_tokens_and_best_tokens_are_read(tmp_path: Path, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    tokens = rng.integers(0, vocabulary, (2, 8))
    steps = rng.permuted(np.tile(np.arange(vocabulary), (2, 3, 1)), axis=2)
    file = tmp_path / "logits"
    file.write_bytes(written(tokens, steps))
    read, best = read_logits(file)
    assert (read == tokens).all()
    assert (best == steps.argmax(axis=2)).all()


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logits").write_bytes(b"GGUF" * 9)
    with pytest.raises(SetUpError, match="not written by llama-perplexity"):
        read_logits(tmp_path / "logits")


def test_an_artefact_agrees_with_itself(tiny_artifact: Artifact) -> None:
    rows = max(tiny_artifact.config.decode_batch_sizes)
    tokens = np.random.default_rng(0).integers(3, 60, (rows, 16))
    columns = dict(scored_columns(tiny_artifact, tokens, 8))
    assert list(columns) == list(range(8, 15))
    best = np.stack([columns[column].argmax(axis=1) for column in columns], axis=1)
    directory = tiny_artifact.vmfb.parent
    same = compare(directory, Scored(1.0, tokens, best))
    assert (same.same, same.apart) == (1.0, 0.0)
    best[0, 2] = columns[10][0].argmin()
    other = compare(directory, Scored(1.0, tokens, best))
    assert other.perplexity == same.perplexity
    assert other.same == 1 - 1 / best.size
    assert other.apart == pytest.approx(np.ptp(columns[10][0]))
