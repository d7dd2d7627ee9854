from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import iree.runtime as iree
import pytest

from shortfin_apps.llm.builder.cache import SERVED
from shortfin_apps.llm.cli import main
from shortfin_apps.llm.contract.errors import ArtifactError, BuildError
from shortfin_apps.llm.contract.host_cpu import HostCpu
from shortfin_apps.llm.contract.host_gpu import HostGpu
from shortfin_apps.llm.serving.server import building, command
from shortfin_apps.llm.serving.server.building import BuildFailed, build_command, built, fitted, is_source
from shortfin_apps.llm.serving.server.config import ServerConfig
from tests.builder.model_files import write_gguf, write_hf
from tests.host_cpus import V3


def settings(artifact: Path | str, **values: object) -> ServerConfig:
    return ServerConfig.of({"artifact": artifact, **values})


@pytest.fixture
def built_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run instead of a build, which all make the folder `made`."""
    commands: list[list[str]] = []

    def run(words: list[str]) -> str:
        commands.append(words)
        return str(tmp_path / "made")

    monkeypatch.setattr(building, "_run", run)
    return commands


def test_a_file_a_hugging_face_directory_and_schemes_are_sources(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    assert is_source(tmp_path / "tiny.gguf")
    assert is_source(write_hf(tmp_path / "hf"))
    assert is_source(Path("hf:org/name:Q4_K_M"))
    assert is_source(Path("random:tiny"))
    assert not is_source(tmp_path)
    assert not is_source(tmp_path / "nowhere")
    assert not is_source(Path("a" * 300))
    (tmp_path / "notes.txt").touch()
    assert not is_source(tmp_path / "notes.txt")


def test_what_is_named_as_a_gguf_file_is_refused_for_what_it_is(tmp_path: Path) -> None:
    pointer = tmp_path / "tiny.gguf"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(BuildError, match="a pointer of Git LFS; fetch the file itself"):
        built(settings(pointer))


@pytest.mark.parametrize("name", ["model.vmfb", "model.haswell.vmfb", "manifest.json"])
def test_a_directory_with_a_program_is_no_source(tmp_path: Path, name: str) -> None:
    directory = write_hf(tmp_path / "hf")
    (directory / name).touch()
    assert not is_source(directory)


@pytest.mark.parametrize(
    ("device", "build_device", "driver"),
    [("cpu", "cpu", "cpu"), ("local-task", "cpu", "local-task"), ("amdgpu:gfx942", "hip:gfx942", "amdgpu")],
)
def test_a_source_is_built_for_the_device(
    built_with: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    build_device: str,
    driver: str,
) -> None:
    monkeypatch.setattr(building, "check_gpu", lambda _: None)
    config = built(settings("random:tiny", device=device, weights="f32", context_length=64))
    [words] = built_with
    assert words[:3] == [sys.executable, "-m", "shortfin_apps.llm"]
    assert words[3:] == [
        *("build", "random:tiny", "--in-cache", "--device", build_device),
        *("--weights", "f32", "--context-length", "64"),
    ]
    assert (config.model.artifact, config.engine.device) == (tmp_path / "made", driver)
    assert config.source == "random:tiny"


def test_a_list_is_built_and_served_on_what_fits(built_with: list[list[str]], tmp_path: Path) -> None:
    """No GPU is needed here, as the list has the CPU, too."""
    config = built(settings("random:tiny", device="hip:gfx942,cpu"))
    assert built_with[0][6:] == ["--device", "hip:gfx942,cpu"]
    assert config.engine.device == "auto"


def test_auto_is_this_machine_in_one_line(
    built_with: list[list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(building, "check_gpu", lambda _: None)
    monkeypatch.setattr(building, "device_of_this_machine", lambda: ("hip:gfx1151", "listed in /sys"))
    config = built(settings("random:tiny", device="auto"))
    assert built_with[0][6:] == ["--device", "hip:gfx1151"]
    assert config.engine.device == "hip"
    assert [record.getMessage() for record in caplog.records] == [
        "--device auto: hip:gfx1151, listed in /sys"
    ]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[HostGpu]:
    """The AMD GPUs of this machine, which the test fills in."""
    gpus: list[HostGpu] = []

    def at_hand(kind: str) -> list[HostCpu | HostGpu]:
        return [V3] if kind == "cpu" else [gpu for gpu in gpus if gpu.kind == kind]

    def of(device: str, ids: Sequence[str] = ()) -> HostGpu:
        return gpus[int(ids[0]) if ids else 0]

    monkeypatch.setattr(building, "hosts_at_hand", at_hand)
    monkeypatch.setattr(building, "host_of", of)
    monkeypatch.setattr(building, "fitting_host", lambda _, hosts: (hosts("hip") + hosts("cpu"))[0])
    return gpus


GFX1100, GFX942 = HostGpu("hip", "gfx1100", 0), HostGpu("hip", "gfx942", 1)


@pytest.mark.parametrize(
    ("gpus", "given", "device", "ids"),
    [
        ([], {}, "cpu", ()),
        ([], {"device": "auto"}, "cpu", ()),
        ([GFX1100], {}, "hip:gfx1100", ()),
        ([GFX942], {"device": "auto"}, "hip:gfx942", ("1",)),
        ([GFX1100, GFX942], {"device": "auto", "device_ids": ("1",)}, "hip:gfx942", ("1",)),
        ([GFX1100], {"device": "cpu"}, "cpu", ()),
        ([GFX1100], {"device": "hip"}, "hip:gfx1100", ()),
        ([GFX1100], {"device": "amdgpu:gfx1100"}, "amdgpu:gfx1100", ()),
        ([GFX1100, GFX942], {"device": "hip", "device_ids": ("1",)}, "hip:gfx942", ("1",)),
        ([GFX1100], {"device_ids": ("0",)}, "cpu", ("0",)),  # a setting without effect, as the log says
        ([HostGpu("hip", None)], {"device": "hip"}, "hip", ()),
    ],
)
def test_a_directory_is_served_on_what_fits_unless_a_device_is_given(
    machine: list[HostGpu],
    tmp_path: Path,
    gpus: list[HostGpu],
    given: dict[str, object],
    device: str,
    ids: tuple[str, ...],
) -> None:
    machine += gpus
    engine = fitted(settings(tmp_path, **given)).engine
    assert (engine.device, engine.device_ids) == (device, ids)
    assert engine.driver == device.partition(":")[0]


def test_a_chip_that_the_machine_does_not_have_is_refused(machine: list[HostGpu], tmp_path: Path) -> None:
    machine.append(GFX1100)
    with pytest.raises(
        ArtifactError, match="`--device hip:gfx942`: this machine has gfx1100; leave the chip"
    ):
        fitted(settings(tmp_path, device="hip:gfx942"))


@pytest.mark.parametrize("device", ["hip,cpu", "hip:gfx942,cpu", "cpu:host,hip"])
def test_a_list_is_for_sources(machine: list[HostGpu], tmp_path: Path, device: str) -> None:
    machine.append(HostGpu("hip", "gfx942"))
    with pytest.raises(ArtifactError, match=rf"^--device {device}: a list of devices is for sources that"):
        fitted(settings(tmp_path, device=device))


def test_auto_needs_a_directory_or_a_source() -> None:
    files = {name: Path("x") for name in ("vmfb", "model_config", "tokenizer_json")}
    with pytest.raises(ArtifactError, match="`--device auto` is for model directories and sources"):
        fitted(ServerConfig.of({**files, "parameters": [Path("x")], "device": "auto"}))


def test_a_draft_models_source_is_built_with_its_own_types(
    built_with: list[list[str]], tmp_path: Path
) -> None:
    config = built(settings("random:tiny", weights="f32", speculative_model="random:tiny-hybrid"))
    drafts, models = built_with
    loops = "--decode-loop-sizes", "1,2,4,8,16,32"  # so that it draws tokens
    assert drafts[3:] == ["build", "random:tiny-hybrid", "--in-cache", "--device", "cpu", *loops]
    assert models[4] == "random:tiny"
    assert config.engine.speculative_model == config.model.artifact == tmp_path / "made"


def test_a_draft_models_directory_is_taken_as_it_is(built_with: list[list[str]], tmp_path: Path) -> None:
    config = settings(tmp_path, speculative_model=tmp_path / "draft")
    assert built(config) is config
    assert not built_with


@pytest.fixture
def head(tmp_path: Path) -> Path:
    directory = tmp_path / "head"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    return directory


def test_an_eagle_head_is_built_into_the_model(
    built_with: list[list[str]], tmp_path: Path, head: Path
) -> None:
    config = built(settings("random:tiny", weights="f32", speculative_model=head))
    [words] = built_with
    assert words[3:] == [
        *("build", "random:tiny", "--in-cache", "--device", "cpu", "--weights", "f32"),
        *("--speculative-model", str(head)),
    ]
    assert (config.engine.speculative, config.engine.speculative_model) == ("mtp", None)
    assert (config.model.artifact, config.source) == (tmp_path / "made", "random:tiny")


def test_an_eagle_head_for_a_model_that_is_built_already_is_refused(
    built_with: list[list[str]], tmp_path: Path, head: Path
) -> None:
    with pytest.raises(ArtifactError, match=f"`shortfin-llm build MODEL --speculative-model {head}`"):
        built(settings(tmp_path, speculative_model=head))
    with pytest.raises(ArtifactError, match="`--speculative ngram` drafts from text"):
        built(settings("random:tiny", speculative_model=head, speculative="ngram"))
    assert not built_with


def test_nothing_is_built_for_a_gpu_that_is_not_there(
    built_with: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iree, "get_driver", no_driver)
    with pytest.raises(ArtifactError, match=r"HIP runtime .* was not found; install ROCm"):
        built(settings("random:tiny", device="hip:gfx942"))
    assert not built_with


def no_driver(name: str) -> None:
    raise RuntimeError(f"{name}: libamdhip64.so not found on the dynamic library search path")


def test_a_model_directory_is_not_built_and_its_types_are_told_to_stay(
    built_with: list[list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tmp_path, weights="f32")
    assert built(config) is config
    assert not built_with
    assert "`--weights` has no effect: the model is built already" in caplog.text


def test_an_unsupported_model_is_refused_without_a_build(built_with: list[list[str]], tmp_path: Path) -> None:
    directory = write_hf(tmp_path / "hf")
    (directory / "config.json").write_text(json.dumps({"model_type": "rwkv"}))
    with pytest.raises(BuildError, match="architecture `rwkv` is not supported"):
        built(settings(directory))
    assert not built_with


def test_a_failed_build_is_the_servers_exit_status(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    assert command.main(["random:huge", "--port", "0"]) == 2
    known = "random:tiny, random:tiny-hybrid, random:tiny-latent"
    assert capfd.readouterr().err == f"error: random:huge: there are only {known}\n"


def test_a_build_that_a_signal_ended_has_its_status() -> None:
    with pytest.raises(BuildFailed) as caught:
        building._run([sys.executable, "-c", "import os; os.kill(os.getpid(), 15)"])
    assert caught.value.status == 128 + 15


@pytest.mark.timeout(20)
def test_a_second_sigterm_kills_a_build_that_does_not_end() -> None:
    """The build is started in its context, as by `_run`; it tells when it ignores SIGTERM."""
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child, building._ends_with_us(child):
        assert child.stdout is not None
        child.stdout.readline()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert child.wait() == -signal.SIGKILL


@pytest.mark.timeout(20)
def test_sigterm_ends_a_stopped_build() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child, building._ends_with_us(child):
        child.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM


def test_build_puts_a_model_where_serve_finds_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_CACHE", str(tmp_path))
    words = build_command(Path("random:tiny"), settings("random:tiny"))
    made = []

    def build(source: str, out: Path, *others: object, **named: object) -> SimpleNamespace:
        out.mkdir(parents=True, exist_ok=True)
        made.append(out)
        return SimpleNamespace(manifest=None)

    monkeypatch.setattr("shortfin_apps.llm.builder.builder.build", build)
    for options in ([], [], ["--top-k", "8"]):
        assert main([*words, *options]) == 0
    assert made[0] == made[1] != made[2]
    assert {out.parent for out in made} == {tmp_path / SERVED}
    assert capsys.readouterr().out.split() == [str(out) for out in made]


def test_a_thread_beside_the_main_one_builds_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It handles no signals, so none is to be passed on."""
    monkeypatch.setattr(building, "build_command", lambda *_: ["--version"])
    made: list[ServerConfig] = []
    thread = threading.Thread(target=lambda: made.append(built(settings("random:tiny"))))
    thread.start()
    thread.join()
    assert str(made[0].model.artifact).startswith("shortfin-llm ")
