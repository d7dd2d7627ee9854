"""The tokenizer of a directory with and without a tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from shortfin_apps.llm.builder.sources.first_look import look_at_directory
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.builder.sources.hf_tokenizer import read_tokenizer
from shortfin_apps.llm.contract.errors import BuildError
from tests.builder.model_files import write_hf
from tests.builder.sources.sentencepiece_data import sentencepiece_model
from tests.builder.sources.test_sentencepiece_file import FEW
from tests.builder.sources.test_tekken_file import write_tekken


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def test_a_tokenizer_json_comes_first(tmp_path: Path) -> None:
    directory = write_hf(tmp_path)
    expected = read_tokenizer(directory, None)
    sha256 = HfDirectorySource(directory).sha256
    write_tekken(directory)
    (directory / "tokenizer.model").write_bytes(b"damaged")
    assert read_tokenizer(directory, None) == expected
    assert HfDirectorySource(directory).sha256 == sha256


def test_a_directory_may_have_a_tekken_json(tmp_path: Path) -> None:
    directory = write_hf(tmp_path)
    sha256 = HfDirectorySource(directory).sha256
    (directory / "tokenizer.json").unlink()
    (directory / "generation_config.json").unlink()
    write_json(directory / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    write_tekken(directory)
    look_at_directory(directory)
    source = HfDirectorySource(directory)
    files = source.tokenizer_files()
    assert source.sha256 != sha256
    assert files.config["chat_template"] == "{{ messages }}"
    assert (files.config["bos_token"], files.config["add_bos_token"]) == ("<s>", True)
    assert files.generation["eos_token_id"] == [258]  # config.json's
    assert read_tokenizer(directory, None).generation["eos_token_id"] == [2]


def test_a_directory_may_have_a_tokenizer_model_and_added_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(FEW))
    write_json(tmp_path / "added_tokens.json", {"<|im_end|>": 6, "<tool>": 7})
    decoder = {
        "7": {"content": "<tool>", "special": False},
        "8": {"content": "[PAD]", "special": True},
        "x": 1,
    }
    write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": decoder, "add_bos_token": False})
    files = read_tokenizer(tmp_path, None)
    tokenizer = Tokenizer.from_str(files.tokenizer)
    assert tokenizer.encode("a<|im_end|><tool>[PAD]").ids == [3, 6, 7, 8]
    assert tokenizer.decode([3, 6, 7, 8]) == "a<tool>"
    assert files.config["add_bos_token"] is False
    assert files.generation["eos_token_id"] == [2, 6]


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    directory = write_hf(tmp_path)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(BuildError, match=r"has no tokenizer\.json, tekken\.json or tokenizer\.model; copy"):
        look_at_directory(directory)
