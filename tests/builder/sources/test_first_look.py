from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter

from shortfin_apps.llm.builder.sources.first_look import look_at_directory, look_at_gguf, look_at_gguf_start
from shortfin_apps.llm.contract.errors import BuildError
from tests.builder.model_files import write_gguf, write_hf


def write_header(path: Path, architecture: str, **tokenizer: str) -> Path:
    """A GGUF file that has nothing but what is looked at."""
    writer = GGUFWriter(path, architecture)
    for name, value in tokenizer.items():
        writer.add_string(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_whole_models_pass(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    look_at_gguf(tmp_path / "tiny.gguf")
    look_at_directory(write_hf(tmp_path / "hf"))


@pytest.mark.parametrize(
    ("architecture", "tokenizer", "message"),
    [
        ("rwkv", {"model": "gpt2"}, "architecture `rwkv` is not supported"),
        ("llama", {"model": "bert"}, "tokenizer model `bert` is not supported; known are gemma4, gpt2"),
        ("llama", {"model": "gpt2", "pre": "bloom"}, "pre-tokenizer `bloom` is not supported; known are"),
        ("llama", {}, "has no tokenizer"),
    ],
)
def test_a_gguf_file_is_refused_by_its_header(
    tmp_path: Path, architecture: str, tokenizer: dict[str, str], message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        look_at_gguf(write_header(tmp_path / "x.gguf", architecture, **tokenizer))


def test_sentence_piece_has_no_pre_tokenizer(tmp_path: Path) -> None:
    path = write_header(tmp_path / "x.gguf", "llama", model="llama", pre="whatever")
    look_at_gguf_start("x", path.read_bytes())


def test_the_start_of_a_file_is_enough_to_refuse_it(tmp_path: Path) -> None:
    start = write_gguf(tmp_path / "x.gguf", keys={"logit_scale": 0.5}).read_bytes()[:1024]
    with pytest.raises(BuildError, match=r"x: `llama\.logit_scale` is 0.5, which is not supported"):
        look_at_gguf_start("x", start)


def test_unknown_keys_are_refused_unless_accepted(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", keys={"hyper_gates": 3})
    with pytest.raises(BuildError, match=r"`llama\.hyper_gates` is 3, and whether"):
        look_at_gguf(path)
    look_at_gguf(path, accepted=["llama.hyper_gates"])
    look_at_gguf_start("x", path.read_bytes())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, r"config\.json: no such file"),
        ("{", r"config\.json: cannot be read"),
        ("[" * 100_000, r"config\.json: cannot be read"),
        ("[]", "must hold a JSON object"),
        (json.dumps({"model_type": "rwkv"}), "architecture `rwkv` is not supported"),
        (json.dumps({"model_type": ["llama"]}), "is not supported"),
        (json.dumps({"model_type": "llama"}), r"has no tokenizer\.json, tekken\.json or tokenizer\.model"),
    ],
)
def test_a_directory_is_refused_by_its_configuration(
    tmp_path: Path, config: str | None, message: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(BuildError, match=message):
        look_at_directory(tmp_path)
