from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from shortfin_apps.llm.components.recorder.dump_file import DumpError
from shortfin_apps.llm.components.recorder.dumps import (
    Dumps,
    WrittenDump,
)
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder
from shortfin_apps.llm.components.recorder.records import Header
from shortfin_apps.llm.serving.frontend.async_engine import JoinedDumps

HEADER = Header(device="fake", num_pages=32, num_window_pages=0, stride=4)


class GatedDumps(Dumps):
    """Each dump waits in its thread until the gate is open."""

    def __init__(self, directory: Path, *, fails: bool = False) -> None:
        super().__init__(FlightRecorder(), directory, HEADER)
        self.gate = threading.Event()
        self.begun = 0
        self._fails = fails

    def write(self, reason: str) -> WrittenDump:
        self.begun += 1
        self.gate.wait()
        if self._fails:
            raise DumpError("no space is left")
        return super().write(reason)


async def until_begun(dumps: GatedDumps, count: int) -> None:
    while dumps.begun < count:
        await asyncio.sleep(0)


@pytest.mark.timeout(20)
async def test_forty_calls_at_once_have_a_file_each_that_is_still_there(tmp_path: Path) -> None:
    dumps = GatedDumps(tmp_path)
    joined = JoinedDumps(dumps)
    first = asyncio.create_task(joined.write("a"))
    await until_begun(dumps, 1)
    calls = [asyncio.create_task(joined.write("a")) for _ in range(40)]
    other = asyncio.create_task(joined.write("b"))
    await asyncio.sleep(0)
    dumps.gate.set()
    files = {written.path for written in await asyncio.gather(*calls)}
    assert len(files) == 1
    assert (await first).path not in files, "it began before they asked"
    assert (await other).path not in files, "it has another reason"
    assert all(path.is_file() for path in files)
    assert dumps.begun == 3


@pytest.mark.timeout(20)
async def test_a_caller_who_leaves_ends_it_for_no_other(tmp_path: Path) -> None:
    dumps = GatedDumps(tmp_path)
    joined = JoinedDumps(dumps)
    gone, waiting = (asyncio.create_task(joined.write("a")) for _ in range(2))
    await until_begun(dumps, 1)
    gone.cancel()
    dumps.gate.set()
    assert (await waiting).path.is_file()
    assert dumps.begun == 1


@pytest.mark.timeout(20)
async def test_an_error_is_told_to_all_and_the_next_call_tries_again(tmp_path: Path) -> None:
    dumps = GatedDumps(tmp_path, fails=True)
    dumps.gate.set()
    joined = JoinedDumps(dumps)
    results = await asyncio.gather(joined.write("a"), joined.write("a"), return_exceptions=True)
    assert [str(error) for error in results] == ["no space is left"] * 2
    with pytest.raises(DumpError):
        await joined.write("a")
    assert dumps.begun == 2
