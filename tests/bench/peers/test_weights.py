from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from bench.peers.weights import write_hugging_face
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from tests.builder.model_files import SPEC, TINY, tiny_tensors, write_gguf


def test_the_directory_holds_the_gguf_files_model_in_bf16(tmp_path: Path) -> None:
    write_hugging_face(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "hf")
    source = HfDirectorySource(tmp_path / "hf")
    for name in ("vocab_size", "hidden_size", "layers"):
        assert getattr(source.spec, name) == getattr(SPEC, name)
    for name, expected in tiny_tensors().items():
        np.testing.assert_array_equal(source.tensor(name), expected.astype(ml_dtypes.bfloat16), err_msg=name)
    files, expected_files = source.tokenizer_files(), TINY.tokenizer_files()
    assert files.generation["eos_token_id"] == expected_files.generation["eos_token_id"]
    assert files.config["chat_template"] == expected_files.config["chat_template"]


def test_tied_weights_are_written_without_a_head(tmp_path: Path) -> None:
    write_hugging_face(write_gguf(tmp_path / "tied.gguf", without="output.weight"), tmp_path / "hf")
    assert HfDirectorySource(tmp_path / "hf").spec.tie_word_embeddings
