from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.cli import main
from shortfin_apps.llm.components.recorder.dumps import Dumps
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder
from shortfin_apps.llm.components.recorder.records import Header
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import make_engine
from tests.integration.generation import generate

PROMPTS = [[5, 6, 7], list(range(40)), list(range(33))]


def written(artifact: Artifact, directory: Path, static_threshold: int | None = None) -> Path:
    """A dump without the first prompts, which the ring no longer has."""
    recorder, device = FlightRecorder(max_bytes=45_000), open_device("cpu", "iree")
    options = EngineSettings(runtime="iree", static_threshold=static_threshold)
    files = artifact.vmfb, artifact.parameters
    engine = make_engine(device, artifact.config, *files, frozenset(), options, recorder=recorder)
    generate(engine, PROMPTS, 30)
    header = Header(
        device="cpu",
        num_pages=engine.stats().pages.total + 1,
        num_window_pages=0,
        stride=artifact.config.stride,
        settings={"static_threshold": static_threshold},
    )
    path = Dumps(recorder, directory, header).write("a test").path
    device.close()
    return path


@pytest.fixture(scope="module")
def dump(tiny_artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tiny_artifact, tmp_path_factory.mktemp("dumps"))


def test_a_dump_is_replayed_and_what_was_before_it_computed(
    dump: Path, tiny_artifact: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay-dump", str(dump), str(tiny_artifact.vmfb.parent)]) == 0
    out = capsys.readouterr().out
    assert "reason: a test" in out
    assert "tokens of before the first record were computed first" in out
    assert "all as recorded" in out


def test_a_dump_is_replayed_on_the_entries_that_the_server_used(
    tiny_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tiny_artifact, tmp_path, static_threshold=0)
    assert b'"entry":"decode' not in gzip.decompress(path.read_bytes())
    assert main(["replay-dump", str(path), str(tiny_artifact.vmfb.parent)]) == 0
    assert "all as recorded" in capsys.readouterr().out


def test_a_part_of_it_is_compared(
    dump: Path, tiny_artifact: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["replay-dump", str(dump), str(tiny_artifact.vmfb.parent), "--json", "-"]
    assert main(command) == 0
    whole = json.loads(capsys.readouterr().out)["replay"]
    first = whole["first_exact_record"]
    assert main([*command, "--from", str(first + 2), "--to", str(first + 4)]) == 0
    part = json.loads(capsys.readouterr().out)["replay"]
    assert (part["records"]["same"], part["first_exact_record"]) == (3, first + 2)


def test_a_row_that_differs_is_named(
    dump: Path, tiny_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = gzip.decompress(dump.read_bytes()).splitlines()
    index = max(index for index, line in enumerate(lines) if b'"kind":"run"' in line)
    record = json.loads(lines[index])
    record["checksums"][-1] ^= 1
    lines[index] = json.dumps(record).encode()
    (tmp_path / "d").write_bytes(gzip.compress(b"\n".join(lines) + b"\n"))
    assert main(["replay-dump", str(tmp_path / "d"), str(tiny_artifact.vmfb.parent), "--json", "-"]) == 1
    [notable] = json.loads(capsys.readouterr().out)["replay"]["notable"]
    start = record["tasks"][-1][1]
    assert (notable["record"], notable["verdict"]) == (record["number"], "differs")
    assert notable["position"] == start
    assert main(["replay-dump", str(tmp_path / "d"), str(tiny_artifact.vmfb.parent)]) == 1
    out = capsys.readouterr().out
    assert "differs" in out
    assert "not all as recorded" in out


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"stride": 8}, "of another model"),
        ({"num_pages": 2}, "of a table of 2"),
        ({"num_pages": 1 << 50}, "no memory"),
    ],
)
def test_a_dump_of_another_model_is_refused(
    dump: Path,
    tiny_artifact: Artifact,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, int],
    problem: str,
) -> None:
    header, *lines = gzip.decompress(dump.read_bytes()).splitlines()
    header = json.dumps(json.loads(header) | change).encode()
    (tmp_path / "d").write_bytes(gzip.compress(b"\n".join([header, *lines]) + b"\n"))
    assert main(["replay-dump", str(tmp_path / "d"), str(tiny_artifact.vmfb.parent)]) == 2
    assert problem in capsys.readouterr().err


def test_texts_of_a_hostile_dump_neither_control_the_terminal_nor_are_markup(
    dump: Path, tiny_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "\x1b]0;mine\x07\x1b[2J[red][/x]\x9b"
    header, *lines = (json.loads(line) for line in gzip.decompress(dump.read_bytes()).splitlines())
    header |= {"reason": hostile, "device": hostile}
    failed = next(line for line in reversed(lines) if line["kind"] == "run")
    failed["error"] = hostile
    texts = [json.dumps(line).encode() for line in (header, *lines)]
    (tmp_path / "d").write_bytes(gzip.compress(b"\n".join(texts) + b"\n"))
    assert main(["replay-dump", str(tmp_path / "d"), str(tiny_artifact.vmfb.parent)]) == 1
    out = capsys.readouterr().out
    assert "reason: ␛]0;mine␇␛[2J[red][/x]" in out
    assert not set(out) & {"\x1b", "\x07", "\x9b"}


def test_part_of_a_dump_says_so(
    dump: Path, tiny_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = gzip.decompress(dump.read_bytes()).splitlines()
    (tmp_path / "d").write_bytes(gzip.compress(b"\n".join(lines[:-9]) + b"\n"))
    assert main(["replay-dump", str(tmp_path / "d"), str(tiny_artifact.vmfb.parent)]) == 0
    assert "was cut off" in capsys.readouterr().out


@pytest.mark.parametrize("threads", ["0", "-1"])
def test_a_number_of_threads_is_positive(threads: str, dump: Path) -> None:
    with pytest.raises(SystemExit):
        main(["replay-dump", str(dump), "DIR", "--threads", threads])


def test_something_is_to_be_done(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay-dump", str(dump)]) == 2
    assert "DIR" in capsys.readouterr().err


def test_a_file_that_is_no_dump_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d").write_bytes(b"garbage")
    assert main(["replay-dump", str(tmp_path / "d"), "DIR"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_unwritable_trace_is_one_sentence(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay-dump", str(dump), "--trace", str(tmp_path / "no" / "trace")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_the_emulated_gpu_is_for_programs_of_gpus(
    dump: Path, tiny_artifact: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay-dump", str(dump), str(tiny_artifact.vmfb.parent), "--emulated"]) == 2
    assert "hip:gfx942" in capsys.readouterr().err
