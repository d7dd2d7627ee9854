"""A file of results against a brute-force model, with crashes at every byte."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.offline.batch.output import (
    SYNC_AT,
    BatchOutput,
    BatchState,
    Finished,
    ResultFile,
    read_result,
    read_state,
    result_of,
    state_path,
    write_state,
)
from shortfin_apps.llm.offline.batch.requests import BatchFileError, BatchInput
from tests.offline.batch.batches import answered, completion, ids_in, opened, result


def test_a_result_has_openais_form() -> None:
    made = result_of("a", answered())
    parsed = json.loads(made.line)
    assert parsed.pop("id").startswith("batch_req_")
    body = json.loads(completion())
    response = {"status_code": 200, "request_id": "request", "body": body}
    assert parsed == {"custom_id": "a", "response": response, "error": None}
    assert (made.prompt_tokens, made.cached_tokens, made.completion_tokens) == (3, 1, 2)


@pytest.mark.parametrize("status", [200, 400, 500])
def test_a_result_is_read_as_it_was_written(status: int) -> None:
    assert read_result(result("é\n", status).line) == Finished("é\n", status == 200)


@pytest.mark.parametrize(
    "body", [b"<html>\nno", b"[]", b'{"usage": []}', b'{"usage": {"prompt_tokens": "?"}}']
)
def test_the_answer_of_another_program_is_one_line_too(body: bytes) -> None:
    made = result_of("a", answered(500, body))
    assert made.line.count(b"\n") == 1
    assert made.prompt_tokens == 0
    assert read_result(made.line) == Finished("a", False)


def test_a_result_has_no_line_end_of_unicode() -> None:
    made = result_of("a\x85", answered(200, "\u2028\u2029".encode()))
    assert len(made.line.decode().splitlines()) == 1
    assert json.loads(made.line)["response"]["body"] == "\u2028\u2029"


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"{}\n", b"\0\0\n", b'{"custom_id": "a"}', b"\xff", b"[" * 99_999]
)
def test_what_is_no_result_is_none(line: bytes) -> None:
    assert read_result(line) is None


IDS = ("a", "b\n", "é", "d" * 50)


def whole_lines(content: bytes) -> int:
    return content.count(b"\n")


def go_on(path: Path, ids: Sequence[str], stop_after: int | None = None) -> list[str]:
    """A run of a batch of `ids`: what it finds finished; appends the others, or `stop_after` of them."""
    with closing(ResultFile.open(path)) as file:
        finished = [each.custom_id for each in file.finished()]
        left = [each for each in ids if each not in finished]
        for custom_id in left[:stop_after]:
            file.append(result(custom_id).line)
    return finished


@pytest.mark.parametrize("zeros", [0, 1, 4096])
def test_after_a_crash_at_any_byte_nothing_is_lost_and_nothing_twice(tmp_path: Path, zeros: int) -> None:
    """Zeros are what a machine may leave behind in place of what was not synced."""
    path = tmp_path / "out.jsonl"
    whole = b"".join(result(custom_id).line for custom_id in IDS)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut] + bytes(zeros))
        assert go_on(path, IDS) == list(IDS[: whole_lines(whole[:cut])])
        assert ids_in(path) == list(IDS)


@given(data=st.data())
def test_any_number_of_crashes_costs_no_more_than_what_was_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("results") / "out.jsonl"
    ids = data.draw(st.lists(st.text(min_size=1, max_size=8), unique=True, min_size=1, max_size=12))
    known = b""  # the model: what is on the disk
    for stop_after in data.draw(st.lists(st.integers(0, 12), max_size=5)):
        finished = go_on(path, ids, stop_after)
        assert len(finished) == whole_lines(known)
        content = path.read_bytes()
        assert content.startswith(known[: known.rfind(b"\n") + 1])
        cut = data.draw(st.integers(known.rfind(b"\n") + 1, len(content)))
        torn = b"\0" * data.draw(st.integers(0, 3)) + data.draw(st.sampled_from([b"", b"\n", b'{"a"\n']))
        known = content[:cut]
        path.write_bytes(known + (torn if torn.startswith(b"\0") else b""))
    go_on(path, ids)
    assert sorted(ids_in(path)) == sorted(ids)


def test_a_line_of_another_program_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    content = result("a").line + b"notes of mine\n" + result("b").line
    path.write_bytes(content)
    with pytest.raises(BatchFileError, match=r"line 2 of .* is not the result of a request"):
        go_on(path, ["a", "b"])
    assert path.read_bytes() == content


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    """The limit on a file's size stands for it: the kernel writes what fits, and refuses the rest."""
    path = tmp_path / "out.jsonl"
    lines = [result(custom_id).line for custom_id in IDS]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(lines[0]) + 10, before[1]))
    try:
        with closing(ResultFile.open(path)) as file:
            file.append(lines[0])
            with pytest.raises(BatchFileError, match=r"cannot write .*File too large"):
                file.append(lines[1])
            with pytest.raises(BatchFileError, match="ends in a part of a line"):
                file.append(lines[2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == lines[0]
    go_on(path, IDS)
    assert ids_in(path) == list(IDS)


def test_a_device_without_room_is_named(tmp_path: Path) -> None:
    full = ResultFile(Path("/dev/full"), os.open("/dev/full", os.O_WRONLY))
    with (
        closing(full),
        pytest.raises(BatchFileError, match="cannot write /dev/full: No space left on device"),
    ):
        full.append(b"x\n")


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with closing(ResultFile.open(path)), pytest.raises(BatchFileError, match="another batch writes"):
        ResultFile.open(path)
    ResultFile.open(path).close()


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none" / "out", "No such file or directory"),
        (tmp_path / "file" / "out", "Not a directory"),
        (tmp_path / "pipe", "is not a regular file"),
        (Path("/proc/out"), "cannot write /proc/out"),  # a directory in which nobody may write
    ):
        with pytest.raises(BatchFileError, match=reason):
            ResultFile.open(path)


def test_clearing_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"x")
    with closing(ResultFile.open(path)) as file:
        assert not file.is_empty
        file.clear()
        assert file.is_empty


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for state in (BatchState("12", None), BatchState("34", "../bad.jsonl")):
        write_state(output, state)
        assert read_state(output) == state
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.state.json"]


@pytest.mark.parametrize("content", [b"", b"{}", b"\0" * 64, b'{"input_sha256": 1, "errors": null}'])
def test_what_is_no_state_is_none(tmp_path: Path, content: bytes) -> None:
    output = tmp_path / "out.jsonl"
    assert read_state(output) is None
    state_path(output).write_bytes(content)
    assert read_state(output) is None


@pytest.mark.timeout(20)
def test_a_pipe_is_no_state(tmp_path: Path) -> None:
    os.mkfifo(state_path(tmp_path / "out.jsonl"))
    assert read_state(tmp_path / "out.jsonl") is None


@pytest.mark.parametrize("suffix", ["", ".new"])
def test_a_link_in_the_place_of_a_state_has_no_other_file_overwritten(tmp_path: Path, suffix: str) -> None:
    output, target = tmp_path / "out.jsonl", tmp_path / "target"
    target.write_text("precious")
    state_path(output).with_name(f"{state_path(output).name}{suffix}").symlink_to(target)
    write_state(output, BatchState("12", None))
    assert read_state(output) == BatchState("12", None)
    assert target.read_text() == "precious"
    assert not state_path(output).is_symlink()


def test_a_folder_in_the_place_of_a_new_state_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.state.json.new").mkdir()
    with pytest.raises(BatchFileError, match=r"cannot write .*out.jsonl.state.json"):
        write_state(tmp_path / "out.jsonl", BatchState("12", None))


def test_a_state_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"cannot write .*out.jsonl.state.json: No such file"):
        write_state(tmp_path / "none" / "out.jsonl", BatchState("12", None))


@pytest.fixture
def batch(tmp_path: Path) -> BatchInput:
    return opened(tmp_path / "in.jsonl", ["a", "b", "c"])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


async def begin(batch: BatchInput, out: Path, errors: Path | None = None, restart: bool = False) -> None:
    """A run that finishes one line, and fails another."""
    with closing(BatchOutput.open(out, errors, batch, restart=restart)) as output:
        assert output.finished == {}
        await output.write(result("a"))
        await output.write(result("b", 400))
        await output.sync()


def finished(batch: BatchInput, out: Path, errors: Path | None = None) -> dict[str, bool]:
    with closing(BatchOutput.open(out, errors, batch, restart=False)) as output:
        return output.finished


async def test_a_batch_goes_on_where_it_ended(batch: BatchInput, out: Path) -> None:
    await begin(batch, out)
    assert finished(batch, out) == {"a": True, "b": False}
    assert ids_in(out) == ["a", "b"]


async def test_failed_lines_have_a_file_of_their_own(batch: BatchInput, out: Path, tmp_path: Path) -> None:
    errors = tmp_path / "bad.jsonl"
    await begin(batch, out, errors)
    assert (ids_in(out), ids_in(errors)) == (["a"], ["b"])
    assert finished(batch, out, errors) == {"a": True, "b": False}
    with pytest.raises(BatchFileError, match=r"was begun with --errors bad.jsonl; give the same"):
        finished(batch, out)


def test_a_file_of_errors_has_a_path_in_utf_8(batch: BatchInput, out: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BatchFileError, match="is not UTF-8"):
        finished(batch, out, tmp_path / "e\udcff")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("directory", [Path(), Path("/")])
def test_an_output_that_is_a_directory_without_a_name_is_refused(batch: BatchInput, directory: Path) -> None:
    with pytest.raises(BatchFileError, match="Is a directory"):
        finished(batch, directory)


async def test_a_file_of_errors_cannot_be_added_later(batch: BatchInput, out: Path, tmp_path: Path) -> None:
    await begin(batch, out)
    with pytest.raises(BatchFileError, match="was begun with no --errors; give the same"):
        finished(batch, out, tmp_path / "bad.jsonl")


async def test_another_input_is_refused_unless_the_batch_restarts(batch: BatchInput, out: Path) -> None:
    await begin(batch, out)
    changed = opened(batch.path, ["a", "b"])
    with pytest.raises(BatchFileError, match="has results of another input, or the input has changed since"):
        finished(changed, out)
    assert ids_in(out) == ["a", "b"]
    await begin(changed, out, restart=True)
    assert finished(changed, out) == {"a": True, "b": False}


async def test_a_file_without_a_state_is_refused_and_kept(batch: BatchInput, out: Path) -> None:
    await begin(batch, out)
    state_path(out).unlink()
    with pytest.raises(
        BatchFileError, match=r"has content, but no out.jsonl.state.json of a batch next to it"
    ):
        finished(batch, out)
    assert ids_in(out) == ["a", "b"]


async def test_an_empty_output_belongs_to_no_input(batch: BatchInput, out: Path) -> None:
    await begin(batch, out)
    out.write_bytes(b"")
    assert finished(opened(batch.path, ["other"]), out) == {}


@pytest.mark.parametrize(("custom_id", "what"), [("a", "a second result"), ("z", "a result for the unknown")])
async def test_an_output_that_was_edited_is_refused(
    batch: BatchInput, out: Path, custom_id: str, what: str
) -> None:
    await begin(batch, out)
    with out.open("ab") as file:
        file.write(result(custom_id).line)
    with pytest.raises(
        BatchFileError, match=f"has {what}( for)? `custom_id` '{custom_id}', so it was changed by hand"
    ):
        finished(batch, out)


def test_input_output_and_errors_are_different_files(batch: BatchInput, out: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(batch.path)
    for output, errors in ((batch.path, None), (tmp_path / "link", None), (out, out), (out, batch.path)):
        with pytest.raises(BatchFileError, match="is named twice"):
            BatchOutput.open(output, errors, batch, restart=True)
    assert batch.path.stat().st_size > 0


@pytest.mark.parametrize("suffix", [".state.json", ".state.json.new"])
def test_neither_input_nor_errors_are_the_files_of_the_state(out: Path, suffix: str) -> None:
    """The state would take the input's place, or the file of errors would be no more."""
    state = out.with_name(out.name + suffix)
    batch = opened(state, ["a"])
    content = state.read_bytes()
    with pytest.raises(BatchFileError, match=rf"{state.name} is named twice"):
        BatchOutput.open(out, None, batch, restart=False)
    assert state.read_bytes() == content
    with pytest.raises(BatchFileError, match=rf"{state.name} is named twice"):
        BatchOutput.open(out, state, opened(out.with_name("in.jsonl"), ["a"]), restart=False)


def test_a_loop_of_links_is_one_sentence(batch: BatchInput, out: Path, tmp_path: Path) -> None:
    out.symlink_to(out)
    with pytest.raises(BatchFileError, match=r"cannot write .*out.jsonl: Too many levels of symbolic links"):
        BatchOutput.open(out, None, batch, restart=False)
    with pytest.raises(BatchFileError, match=r"cannot write .*out.jsonl: Too many levels of symbolic links"):
        BatchOutput.open(tmp_path / "other.jsonl", out, batch, restart=False)


def num_open_in(folder: Path) -> int:
    """Files of the folder that this process has open; what other tests open and close does not count."""
    num_open = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            num_open += link.readlink().parent == folder
    return num_open


def test_what_is_refused_stays_open_for_nobody(batch: BatchInput, out: Path) -> None:
    out.write_bytes(b"mine\n")
    num_open = num_open_in(out.parent)
    with pytest.raises(BatchFileError):
        finished(batch, out)
    assert num_open_in(out.parent) == num_open
    ResultFile.open(out).close()


async def test_lines_are_synced_in_groups_however_many_write_at_once(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [str(number) for number in range(10 * SYNC_AT)]
    written, on_disk, most = 0, 0, 0

    def sync(file: ResultFile) -> None:
        nonlocal on_disk
        num_syncs.append(1)
        on_disk = whole

    num_syncs: list[int] = []
    whole = 0
    monkeypatch.setattr(ResultFile, "sync", sync)
    with closing(BatchOutput.open(out, None, opened(tmp_path / "in.jsonl", ids), restart=False)) as output:

        async def write(custom_id: str) -> None:
            nonlocal written, whole, most
            await output.write(result(custom_id))
            written += 1
            whole = written
            most = max(most, written - on_disk)

        await asyncio.gather(*map(write, ids))
        await output.sync()
    assert on_disk == len(ids)
    assert most <= 2 * SYNC_AT
    assert len(num_syncs) <= 11


async def test_what_is_written_is_synced_after_a_while(
    batch: BatchInput, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(ResultFile, "sync", lambda _: loop.call_soon_threadsafe(synced.set))
    ticks: asyncio.Queue[float] = asyncio.Queue()
    with closing(BatchOutput.open(out, None, batch, restart=False)) as output:
        syncing = asyncio.ensure_future(output.sync_often(lambda _: ticks.get()))
        await output.write(result("a"))
        ticks.put_nowait(1.0)
        await synced.wait()
        syncing.cancel()
        with suppress(asyncio.CancelledError):
            await syncing
