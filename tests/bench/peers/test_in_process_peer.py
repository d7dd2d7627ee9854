from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.peers import in_process_peer
from bench.peers.cache import Cache, SetUpError
from bench.peers.in_process_peer import EnginePackage, InProcessPeer
from bench.peers.kinds import KINDS
from bench.peers.onnxruntime_genai import ORT
from bench.peers.openvino_genai import OPENVINO

WRITES = "import sys, pathlib; folder = pathlib.Path(sys.argv[1]); folder.mkdir(); (folder / 'done').touch()"
FAILS = "raise SystemExit(1)"


def package(code: str) -> EnginePackage:
    """An engine that needs no installation, whose converter is that code."""
    return EnginePackage(
        "tiny",
        (),
        "tiny.engine",
        1,
        lambda kind: kind.ort,
        lambda *about: [sys.executable, "-c", code, about[2]],
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """One where every environment is installed and the Hugging Face directory is written."""
    made = Cache(tmp_path, lambda _: None)
    for each in (package(WRITES), OPENVINO, ORT):
        made.once(each.label, each.installed, lambda: None)
    monkeypatch.setattr(in_process_peer, "model_directory", lambda _: tmp_path / "model-hf")
    return made


def test_a_model_is_converted_once_for_each_format(cache: Cache) -> None:
    peer = InProcessPeer(cache, 2, sys.executable, package(WRITES))
    for weights in ("bf16", "q8_0", "int8"):
        peer.set_up(KINDS[weights])
    assert sorted(path.name for path in cache.root.glob("tiny-*")) == ["tiny-fp32", "tiny-int8"]
    command = peer.launch(80, 1).command
    assert command[1:] == (
        "-m",
        "tiny.engine",
        str(cache.root / "tiny-int8"),
        "--port",
        "80",
        "--threads",
        "2",
    )


def test_an_interrupted_conversion_starts_again(cache: Cache) -> None:
    with pytest.raises(SetUpError, match=r"tiny\.log"):
        InProcessPeer(cache, 2, sys.executable, package(FAILS)).set_up(KINDS["bf16"])
    (cache.root / "tiny-fp32.part").mkdir()
    InProcessPeer(cache, 2, sys.executable, package(WRITES)).set_up(KINDS["bf16"])
    assert (cache.root / "tiny-fp32" / "done").exists()


def test_only_bf16_weights_fix_the_precision(cache: Cache) -> None:
    for weights, options in (("bf16", ("--precision", "bf16")), ("q4_1", ())):
        found = OPENVINO.format_of(KINDS[weights])
        assert found is not None
        assert OPENVINO.options_of(found) == options
    assert ORT.options_of("fp32") == ()


def test_converters_get_the_weights_and_both_directories() -> None:
    for each, weights in ((OPENVINO, "int4"), (ORT, "int4")):
        command = list(map(str, each.convert(Path("bin"), Path("from"), Path("to"), weights)))
        assert command[0].startswith("bin/")
        assert {"from", "to", "int4"} <= set(command)


def test_nothing_is_missing_after_the_installation(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for each in (OPENVINO, ORT):
        needs = InProcessPeer(cache, 2, sys.executable, each).needs(KINDS["bf16"])
        assert needs.disk_bytes == 0
        assert not any("torch" in sentence for sentence in needs.missing)


def test_torch_is_required_for_the_converters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    needs = InProcessPeer(Cache(tmp_path, lambda _: None), 2, sys.executable, ORT).needs(KINDS["bf16"])
    assert any("torch 2.13.0+cpu" in sentence for sentence in needs.missing)
    assert needs.disk_bytes > 1e9
