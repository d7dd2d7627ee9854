"""The compiler is faked here where a test is about files; `tiny_artifact` is the real thing."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from shortfin_apps.llm.artifact import file_names
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder import builder
from shortfin_apps.llm.builder import cache as cache_module
from shortfin_apps.llm.builder.builder import build
from shortfin_apps.llm.builder.output import file_error
from shortfin_apps.llm.builder.progress import PlainProgress, QuietProgress
from shortfin_apps.llm.builder.self_test.make import make_self_test
from shortfin_apps.llm.builder.sources.base import ModelSource
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.contract.errors import ArtifactError, BuildError
from shortfin_apps.llm.contract.self_test_file import SelfTestFile
from shortfin_apps.llm.model.spec import BuildOptions, WeightType
from tests.builder.fake_compiler import FakeCompiler
from tests.builder.gguf_data import write_random_gguf
from tests.builder.model_files import write_gguf, write_hf

OPTIONS = BuildOptions()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCompiler:
    monkeypatch.setenv("SHORTFIN_LLM_CACHE", str(tmp_path / "cache"))
    fake = FakeCompiler()
    monkeypatch.setattr(builder, "compile_model", fake.compile_model)
    return fake


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"cache"}


def build_tiny(out: Path, options: BuildOptions = OPTIONS, *, use_cache: bool = True) -> Artifact:
    return build("random:tiny", out, options, QuietProgress(), use_cache=use_cache)


def test_an_artefact_has_its_files_and_nothing_else(tiny_artifact: Artifact) -> None:
    folder = tiny_artifact.vmfb.parent
    assert names(folder) == {*file_names.FILES, file_names.MANIFEST}
    assert names(folder.parent) == {folder.name}
    config = json.loads((folder / file_names.CONFIG).read_text())
    assert config == json.loads(json.dumps(tiny_artifact.config.to_dict()))


def test_the_same_thing_again_is_up_to_date(compiler: FakeCompiler, tmp_path: Path) -> None:
    first = build_tiny(tmp_path / "a")
    before = (tmp_path / "a" / file_names.MANIFEST).stat().st_ino
    assert build_tiny(tmp_path / "a") == first
    assert (tmp_path / "a" / file_names.MANIFEST).stat().st_ino == before
    assert len(compiler.devices) == 1


def test_a_second_folder_comes_from_the_cache(
    compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_tiny(tmp_path / "a")
    monkeypatch.setattr(builder, "write_weights", None)  # calling it would fail
    second = build_tiny(tmp_path / "b")
    assert len(compiler.devices) == 1
    assert second.manifest == first.manifest
    assert second.vmfb.read_bytes() == first.vmfb.read_bytes()


def test_weights_and_program_are_cached_apart(compiler: FakeCompiler, tmp_path: Path) -> None:
    first = build_tiny(tmp_path / "a")
    other_buckets = build_tiny(tmp_path / "b", replace(OPTIONS, decode_batch_sizes=(1,)))
    assert len(compiler.devices) == 2
    assert other_buckets.parameters[0].read_bytes() == first.parameters[0].read_bytes()
    other_pages = build_tiny(tmp_path / "c", replace(OPTIONS, device_block_count=99))
    assert len(compiler.devices) == 2
    assert other_pages.config.paged_kv_cache.device_block_count == 99
    same_shape = build(str(write_hf(tmp_path / "hf")), tmp_path / "d", OPTIONS, QuietProgress())
    assert len(compiler.devices) == 2
    assert same_shape.manifest is not None
    assert first.manifest is not None
    assert same_shape.manifest.source != first.manifest.source


def test_other_options_replace_the_artefact(compiler: FakeCompiler, tmp_path: Path) -> None:
    build_tiny(tmp_path / "a")
    again = build_tiny(tmp_path / "a", replace(OPTIONS, weights="f32"))
    assert again.manifest is not None
    assert again.manifest.options.weights == "f32"
    assert names(tmp_path) == {"a"}


def test_a_damaged_artefact_is_built_again(compiler: FakeCompiler, tmp_path: Path) -> None:
    (build_tiny(tmp_path / "a").vmfb).unlink()
    assert build_tiny(tmp_path / "a").vmfb.is_file()


def flip_last_byte(path: Path) -> None:
    """In place, as a user's tool or a bad disk would."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 0xFF]))


@pytest.mark.parametrize("name", file_names.FILES)
def test_a_build_repairs_a_flipped_byte(compiler: FakeCompiler, tmp_path: Path, name: str) -> None:
    path = build_tiny(tmp_path / "a").vmfb.with_name(name)
    whole = path.read_bytes()
    flip_last_byte(path)
    build_tiny(tmp_path / "a")
    assert path.read_bytes() == whole
    assert len(compiler.devices) == 1


@pytest.mark.parametrize("name", [file_names.VMFB, file_names.PARAMETERS])
def test_writing_to_an_artefact_leaves_the_cache_and_other_artefacts_alone(
    compiler: FakeCompiler, tmp_path: Path, name: str
) -> None:
    first, second = (build_tiny(tmp_path / folder).vmfb.with_name(name) for folder in ("a", "b"))
    whole = second.read_bytes()
    flip_last_byte(first)
    assert second.read_bytes() == whole
    assert build_tiny(tmp_path / "c").vmfb.with_name(name).read_bytes() == whole
    assert len(compiler.devices) == 1


@pytest.mark.parametrize("name", [file_names.VMFB, file_names.PARAMETERS])
def test_a_damaged_cache_is_rebuilt(
    compiler: FakeCompiler, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = build_tiny(tmp_path / "a").vmfb.with_name(name).read_bytes()
    (cached,) = (tmp_path / "cache" / "build").rglob(name)
    flip_last_byte(cached)
    shutil.rmtree(tmp_path / "a")
    build("random:tiny", tmp_path / "a", OPTIONS, PlainProgress())
    assert (tmp_path / "a" / name).read_bytes() == whole
    assert (
        f"{cached}: has another content (its SHA-256 differs); it will be rebuilt" in capsys.readouterr().err
    )


def test_no_cache_keeps_no_copy(compiler: FakeCompiler, tmp_path: Path) -> None:
    for name in ("a", "b"):
        build_tiny(tmp_path / name, use_cache=False)
    assert len(compiler.devices) == 2
    assert not (tmp_path / "cache" / "build").exists()
    assert names(tmp_path) == {"a", "b"}


def test_the_same_model_from_gguf_and_safetensors_has_the_same_parameters(
    compiler: FakeCompiler, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    sources = ("random:tiny", str(tmp_path / "tiny.gguf"), str(write_hf(tmp_path / "hf", shards=2)))
    built = [
        build(source, tmp_path / "out" / str(index), OPTIONS, QuietProgress())
        for index, source in enumerate(sources)
    ]
    contents = [artifact.parameters[0].read_bytes() for artifact in built]
    assert contents[0] == contents[1] == contents[2]


@pytest.mark.parametrize(
    ("kind", "weights", "says"),
    [
        ("Q4_1", "bf16", r"are Q4_1, and `--weights auto` keeps them as they are, in "),
        ("Q8_0", "q4", r"are Q8_0, and `--weights auto` keeps them as they are, in "),
        ("Q5_1", "f16", r"are Q5_1, and `--weights auto` keeps them as they are, in "),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "hip:gfx942"])
def test_a_quantised_source_is_told_what_becomes_of_it(
    compiler: FakeCompiler,
    tmp_path: Path,
    kind: str,
    weights: WeightType,
    says: str,
    device: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = str(write_gguf(tmp_path / "tiny.gguf", quantised=GGMLQuantizationType[kind]))
    options = replace(OPTIONS, weights=weights, device=device)
    artifact = build(source, tmp_path / "a", options, PlainProgress())
    (line,) = (line for line in capsys.readouterr().err.splitlines() if says in line)
    size = artifact.parameters[0].stat().st_size / 1e6
    assert line.startswith(f"weights: {weights}, ")
    assert float(line.split()[2]) == pytest.approx(size, abs=0.11)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (None, r"weights: bf16, [\d.]+ MB; `--weights q8_0` makes [\d.]+ MB"),
        (
            "Q8_0",
            r"weights: q8_0, [\d.]+ MB, as most of the source's are Q8_0; `--weights bf16` makes [\d.]+ MB",
        ),
        (
            "Q5_0",
            r"are Q5_0 \(5\.5 bits a weight, kept in 8\); `--weights q4` makes [\d.]+ MB",
        ),
    ],
)
def test_own_types_are_told_with_their_size(
    compiler: FakeCompiler, tmp_path: Path, kind: str | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    quantised = None if kind is None else GGMLQuantizationType[kind]
    source = str(write_gguf(tmp_path / "tiny.gguf", quantised=quantised))
    artifact = build(source, tmp_path / "a", OPTIONS, PlainProgress(), own_types=True)
    assert re.search(says, capsys.readouterr().err)
    assert artifact.manifest is not None
    assert artifact.manifest.options.weights == ("bf16" if kind is None else "q8_0")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("IQ2_XXS", r"weights: q8_0, .* are IQ2_XXS \(2\.1 bits a weight, kept in 8\); `--weights q4` makes"),
        ("IQ1_S", r"weights: q4, .* are IQ1_S \(1\.6 bits a weight, kept in 4\); `--weights bf16` makes"),
        ("TQ1_0", r"weights: q4, .* are TQ1_0 \(1\.7 bits a weight, rounded in 4\); `--weights bf16` makes"),
    ],
)
def test_weights_that_take_more_bits_are_told_with_them(
    compiler: FakeCompiler, tmp_path: Path, kind: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(write_random_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType[kind], {}))
    build(source, tmp_path / "a", OPTIONS, PlainProgress(), own_types=True)
    assert re.search(says, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("kind", "weights"), [(None, "bf16"), (None, "q4"), ("Q4_0", "q4"), ("Q8_0", "q8_0")]
)
def test_weights_as_they_are_in_the_source_need_no_words(
    compiler: FakeCompiler,
    tmp_path: Path,
    kind: str | None,
    weights: WeightType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    quantised = None if kind is None else GGMLQuantizationType[kind]
    source = str(write_gguf(tmp_path / "tiny.gguf", quantised=quantised))
    build(source, tmp_path / "a", replace(OPTIONS, weights=weights), PlainProgress())
    assert "the source's" not in capsys.readouterr().err


def test_builds_for_a_cpu_that_this_host_is_not(compiler: FakeCompiler, tmp_path: Path) -> None:
    options = replace(OPTIONS, device="cpu:diamondrapids")
    first = build_tiny(tmp_path / "a", options)
    assert build_tiny(tmp_path / "a", options) == first
    assert len(compiler.devices) == 1
    with pytest.raises(ArtifactError, match=r"compiled for a CPU \(diamondrapids\)"):
        Artifact.open(tmp_path / "a")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BuildError("no"), OSError(errno.EIO, "bad disk")])
def test_a_build_that_stops_leaves_things_as_they_were(
    compiler: FakeCompiler, tmp_path: Path, error: BaseException
) -> None:
    build_tiny(tmp_path / "old")
    before = (tmp_path / "old" / file_names.MANIFEST).read_bytes()
    other = replace(OPTIONS, top_k=5)
    compiler.fail_for, compiler.fail = OPTIONS.device, error
    for name in ("old", "new"):
        with pytest.raises((KeyboardInterrupt, BuildError)):
            build_tiny(tmp_path / name, other)
    assert names(tmp_path) == {"old"}
    assert (tmp_path / "old" / file_names.MANIFEST).read_bytes() == before
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_full_disk_is_named_in_one_sentence(
    compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, cache = tmp_path / "a", tmp_path / "cache"

    def problem_of(error: OSError, *, use_cache: bool = True) -> str:
        compiler.fail_for, compiler.fail = OPTIONS.device, error
        with pytest.raises(BuildError) as refused:
            build_tiny(out, use_cache=use_cache)
        return str(refused.value)

    prune = "free some (`shortfin-llm prune` removes from the cache) and run it again"
    full = (errno.ENOSPC, "No space left on device")
    assert problem_of(OSError(*full)) == f"no space left in the cache {cache} while building {out}; {prune}"
    in_out = f"no space left in {out} while building {out}; free some and run it again"
    assert problem_of(OSError(*full), use_cache=False) == in_out
    elsewhere = OSError(errno.EDQUOT, "Disk quota exceeded", "/tmp/x")
    assert problem_of(elsewhere) == in_out.replace(str(out), "/tmp/x", 1)

    def copy(source: Path, target: Path) -> None:  # as `shutil.copyfile` names the files
        raise OSError(*full, str(source), None, str(target))

    monkeypatch.setattr(cache_module, "clone", lambda source, target: False)
    monkeypatch.setattr(shutil, "copyfile", copy)
    compiler.fail_for = None
    with pytest.raises(BuildError) as refused:
        build_tiny(out)
    assert str(refused.value) == in_out
    assert str(file_error(OSError(*full), out)).startswith(f"no space left in {out} or the cache {cache} ")


def test_a_cache_that_cannot_be_written_is_a_build_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHORTFIN_LLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="file"):
        build_tiny(tmp_path / "a")


# Code that no parameters, programs and self-tests depend on.
NEITHER = (
    "__init__.py",
    "builder.py",
    "cache.py",
    "cache_contents.py",
    "cache_list.py",
    "cache_prune.py",
    "cli.py",
    "device_list.py",
    "output.py",
    "progress.py",
    "tokenizer_config.py",
)


def test_every_file_of_the_builder_is_in_a_cache_key_or_known_to_matter_for_none() -> None:
    folders = {name.partition("/")[0] for name in builder._code_hashes()}
    known = {*builder.WEIGHTS_CODE, *builder.PROGRAM_CODE, *builder.SELF_TEST_CODE, *NEITHER}
    assert folders == known


def test_the_compiler_of_kernels_is_part_of_a_program_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"triton": "3.9.0"}

    def version_of(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(builder, "version", version_of)
    gpu = Target("hip:gfx942", (), "amdgpu", "gfx942", frozenset())
    assert builder.triton_version(gpu) == "3.9.0"
    assert builder.triton_version(resolve_target("cpu")) is None
    installed.clear()
    assert builder.triton_version(gpu) is None


def test_without_a_self_test_an_artefact_opens_and_a_build_with_one_replaces_it(
    compiler: FakeCompiler, tmp_path: Path
) -> None:
    without = build("random:tiny", tmp_path / "a", OPTIONS, QuietProgress(), self_test=False)
    assert without.self_test is None
    assert names(tmp_path / "a") == {*file_names.FILES, file_names.MANIFEST} - {file_names.SELF_TEST}
    assert build("random:tiny", tmp_path / "a", OPTIONS, QuietProgress(), self_test=False) == without
    again = build_tiny(tmp_path / "a")
    assert again.self_test == tmp_path / "a" / file_names.SELF_TEST
    assert len(compiler.devices) == 1


def test_a_self_test_comes_from_the_cache_unless_weights_or_pages_are_others(
    compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tiny(tmp_path / "a")
    made: list[BuildOptions] = []

    def counted(
        source: ModelSource, options: BuildOptions, target: Target, advance: Callable[[int], None]
    ) -> SelfTestFile:
        made.append(options)
        return make_self_test(source, options, target, advance)

    monkeypatch.setattr(builder, "make_self_test", counted)
    build_tiny(tmp_path / "b", replace(OPTIONS, decode_batch_sizes=(1,)))
    assert not made
    for options in (replace(OPTIONS, weights="f32"), replace(OPTIONS, block_seq_stride=8)):
        build_tiny(tmp_path / "c", options)
        assert made.pop() == replace(options, device="cpu")


def test_what_is_left_out_is_said_in_one_line(
    compiler: FakeCompiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model with a vision tower."""
    directory = write_hf(tmp_path / "model", config={"model_type": "mistral"})
    tensors = {f"language_model.{n}": t for n, t in load_file(directory / "model.safetensors").items()}
    tensors |= {f"vision_tower.{n}": np.zeros(250_000, np.float32) for n in "xy"}
    save_file(tensors, directory / "model.safetensors")
    text = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": text}))
    build(str(directory), tmp_path / "a", OPTIONS, PlainProgress())
    lines = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert lines == ["left out: vision and audio parts (2 tensors, 2.0 MB), as only text is supported"]
