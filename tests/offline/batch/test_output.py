from __future__ import annotations

import asyncio
import os
from contextlib import closing, suppress
from pathlib import Path

import pytest

from shortfin_apps.llm.offline.batch.errors import BatchFileError
from shortfin_apps.llm.offline.batch.output import SYNC_AT, BatchOutput
from shortfin_apps.llm.offline.batch.requests import BatchInput
from shortfin_apps.llm.offline.batch.result_file import ResultFile
from shortfin_apps.llm.offline.batch.state import state_path
from tests.offline.batch.batches import ids_in, opened, result


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


def test_what_is_refused_stays_open_for_nobody(batch: BatchInput, out: Path) -> None:
    out.write_bytes(b"mine\n")
    num_open = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(BatchFileError):
        finished(batch, out)
    assert len(os.listdir("/proc/self/fd")) == num_open  # noqa: PTH208
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
