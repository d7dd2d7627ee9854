"""A server in this process with something wrong, and what of the ways to prove itself notices it."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.artifact.file_names import PARAMETERS
from shortfin_apps.llm.artifact.verification import verifying
from shortfin_apps.llm.client import LlmClient
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.recorder.dump_file import read_dump
from shortfin_apps.llm.components.runtime import parameters as parameters_module
from shortfin_apps.llm.components.runtime.memory import empty_bytes
from shortfin_apps.llm.components.self_test import watch as watch_module
from shortfin_apps.llm.components.self_test.self_test import Outcome
from shortfin_apps.llm.components.self_test.watch import SelfTestWatch
from shortfin_apps.llm.contract.errors import ArtifactError, SelfTestError
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from shortfin_apps.llm.serving.frontend.engine_thread import Abort
from shortfin_apps.llm.serving.receipts.receipt import Receipt, ReceiptError
from shortfin_apps.llm.tools.dump_replay.session import Where
from shortfin_apps.llm.tools.dump_replay.session import replay as replay_dump
from shortfin_apps.llm.tools.replay.in_process import EXTEND, SCHEDULES, opened
from shortfin_apps.llm.tools.replay.in_process import replay as replay_receipts
from shortfin_apps.llm.tools.replay.over_http import replay_on
from tests.integration.served_tiny import serving
from tests.integration.server_process import PATIENCE_S

PAGES = 64  # of 16 tokens: of all that is asked, none is evicted
RARE = 200  # a token that the self-test of the tiny model does not have
SHARED = tuple(range(40, 88))  # three pages that prompts begin with
PROMPTS = (
    (*SHARED, 7, 9, *range(90, 120)),
    (*SHARED, 33, 34),
    (61, RARE, 62, 63),
    tuple(range(100, 32, -1)),
)
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.9, "seed": 5})


class Check(StrEnum):
    """HASH: `serve --verify hash` refuses the files. LOAD: it does so with `--verify none`, too. START,
    HOURLY: the self-test of a server that starts so, and of one that was sound at its start. ANSWER: a
    request fails. DIR: receipts of those that do not are replayed alone on the artefact as it was built;
    SAME: on the same server. DUMP: the flight recorder's dump is replayed on the artefact as it was built.
    """

    HASH = "hash"
    LOAD = "load"
    START = "start"
    HOURLY = "hourly"
    ANSWER = "answer"
    DIR = "replay DIR"
    SAME = "replay --url"
    DUMP = "replay-dump"


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs, and its parts."""

    client: httpx.AsyncClient
    frontend: AsyncEngine

    @property
    def engine(self) -> Engine:
        return self.frontend._engine

    @property
    def runner(self) -> BatchRunner:
        return self.engine._runner

    @property
    def watch(self) -> SelfTestWatch:
        found = self.frontend._thread._idle_test
        assert isinstance(found, SelfTestWatch)
        return found

    async def ask(self, prompts: tuple[tuple[int, ...], ...], sampling: dict[str, Any]) -> list[Receipt]:
        """The receipts of all prompts, which run beside each other; none for those that fail."""
        params = {"ignore_eos": True, **sampling}

        async def one(prompt: tuple[int, ...]) -> Receipt | None:
            body = {"input_ids": list(prompt), "sampling_params": params, "receipt": True}
            response = await self.client.post("/generate", json=body)
            if response.status_code != 200:
                return None
            return Receipt.parse(response.json()["responses"][0]["responses"][0]["meta_info"]["receipt"])

        found = await asyncio.gather(*map(one, prompts))
        return [receipt for receipt in found if receipt is not None]


@dataclass(frozen=True, kw_only=True)
class Damage:
    """`to_files` is done to the artefact's folder, with manifest and all if the damage `is_built`; `before`
    to the device; `running` to a server that answered a prompt of SHARED. `undo` makes the device sound.
    """

    to_files: Callable[[Path], None] | None = None
    before: Callable[[], None] | None = None
    running: Callable[[Server], None] | None = None
    is_built: bool = False
    undo: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Observed:
    """The checks that a damage went through, whether they noticed it, and how long they took in seconds."""

    caught: dict[Check, bool] = field(default_factory=dict)
    seconds: dict[Check, float] = field(default_factory=dict)

    def note(self, check: Check, caught: Callable[[], bool]) -> None:
        began_s = time.perf_counter()
        self.caught[check] = caught()
        self.seconds[check] = time.perf_counter() - began_s

    async def note_awaited(self, check: Check, caught: Awaitable[bool]) -> None:
        began_s = time.perf_counter()
        self.caught[check] = await caught
        self.seconds[check] = time.perf_counter() - began_s

    @property
    def by(self) -> set[Check]:
        return {check for check, caught in self.caught.items() if caught}


@dataclass(frozen=True, slots=True)
class Bench:
    """Where damages are tried: a `sound` artefact, an empty `folder`, the device that runs it, the server's
    batch mode, and how many tokens each request asks for.
    """

    sound: Path
    folder: Path
    device: str = "cpu"
    mode: str = "auto"
    max_tokens: int = 24

    def observe(self, damage: Damage) -> Observed:
        damaged = Path(shutil.copytree(self.sound, self.folder / "damaged"))
        if damage.to_files is not None:
            damage.to_files(damaged)
        if damage.before is not None:
            damage.before()
        observed = Observed()
        observed.note(Check.HASH, lambda: hash_tells(damaged))
        if damage.running is None:
            began_s = time.perf_counter()
            failed = self._start_failure(damaged)
            observed.caught |= {Check.LOAD: failed is Check.LOAD, Check.START: failed is Check.START}
            observed.seconds[failed or Check.START] = time.perf_counter() - began_s
            if failed is Check.LOAD:
                return observed
        receipts, dump = asyncio.run(self._served(damage, damaged, observed))
        damage.undo()
        built = damaged if damage.is_built else self.sound
        if receipts:
            observed.note(Check.DIR, lambda: self._receipts_tell(built, receipts))
        observed.note(Check.DUMP, lambda: self._dump_tells(built, dump))
        if damage.to_files is not None and not damage.is_built:
            asyncio.run(self._damaged_later(damage.to_files, observed))
        return observed

    async def _served(
        self, damage: Damage, directory: Path, observed: Observed
    ) -> tuple[list[Receipt], Path]:
        """What the server answered, and its dump."""
        self_test = "off" if damage.running is None else "hourly"
        async with self._serving(directory, self_test) as server:
            await server.ask((SHARED,), {"max_tokens": 1})
            if damage.running is not None:
                damage.running(server)
            samplings = [{"max_tokens": self.max_tokens, **each} for each in SAMPLINGS]
            receipts = [receipt for each in samplings for receipt in await server.ask(PROMPTS, each)]
            observed.caught[Check.ANSWER] = len(receipts) < len(PROMPTS) * len(SAMPLINGS)
            dump = await server.frontend.dump("a test")
            if receipts:
                await observed.note_awaited(Check.SAME, answers_differ(server, receipts))
            if damage.running is not None:
                await observed.note_awaited(Check.HOURLY, fails_an_hour_later(server))
        return receipts, dump.path

    async def _damaged_later(self, to_files: Callable[[Path], None], observed: Observed) -> None:
        """The files are changed in their places while a sound server runs on them, and what it has in memory
        of the parameters with them.
        """
        directory = Path(shutil.copytree(self.sound, self.folder / "later"))
        with kept_parameters() as memory:
            async with self._serving(directory, "hourly") as server:
                to_files(directory)
                [content] = memory
                content[:] = np.fromfile(directory / PARAMETERS, np.uint8)
                await observed.note_awaited(Check.HOURLY, fails_an_hour_later(server))

    @asynccontextmanager
    async def _serving(self, directory: Path, self_test: str) -> AsyncIterator[Server]:
        artifact = Artifact.open(directory, check_sizes=False)
        settings = {
            "device": self.device,
            "batch_mode": self.mode,
            "pages": PAGES,
            "verify": "none",
            "dump_dir": self.folder,
        }
        async with serving(artifact, self_test=self_test, **settings) as (client, service):
            frontend = service.model.generator.engine
            assert isinstance(frontend, AsyncEngine)
            yield Server(client, frontend)

    def _start_failure(self, directory: Path) -> Check | None:
        """What keeps a server from starting that does not look at hashes."""

        async def start() -> None:
            async with self._serving(directory, "start"):
                pass

        try:
            asyncio.run(start())
        except SelfTestError as error:
            forget_report(str(error))
            return Check.START
        except ArtifactError:
            return Check.LOAD
        return None

    def _receipts_tell(self, directory: Path, receipts: list[Receipt]) -> bool:
        """Whether one differs, or is refused as it is of another model."""
        schedule = SCHEDULES[EXTEND if self.mode == EXTEND else "alone"]
        try:
            with opened(directory, receipts, self.device) as subject:
                return bool(replay_receipts(subject, schedule).differences)
        except ReceiptError:
            return True

    def _dump_tells(self, directory: Path, dump: Path) -> bool:
        summary = replay_dump(read_dump(dump), directory, Where(device=self.device))
        assert summary.is_same_program
        return not summary.is_as_recorded


def hash_tells(directory: Path) -> bool:
    """Whether `serve --verify hash` refuses the files."""
    try:
        with verifying(Artifact.open(directory, check_sizes=False), "hash") as confirm:
            confirm()
    except ArtifactError:
        return True
    return False


async def answers_differ(server: Server, receipts: list[Receipt]) -> bool:
    """Asks the server again, one request at a time."""
    async with LlmClient("http://test") as client:
        with patch.object(client, "_http", server.client):
            return bool((await replay_on(client, receipts, 1)).differences)


async def fails_an_hour_later(server: Server) -> bool:
    """Has the server believe that an hour is over, and waits for its self-test."""
    watch, is_done = server.watch, threading.Event()
    finish = watch._finish

    def finish_and_tell(outcome: Outcome) -> None:
        finish(outcome)
        is_done.set()

    hour_s = watch_module.INTERVAL_S
    with (
        patch.object(watch, "_finish", finish_and_tell),
        patch.object(watch, "_clock", lambda: time.monotonic() + hour_s),
        patch.object(watch_module, "IDLE_S", 0.0),
    ):
        server.frontend._thread.send(Abort("nobody"))  # wakes it
        assert await asyncio.to_thread(is_done.wait, PATIENCE_S)
    if watch.failure is not None:
        forget_report(watch.failure)
    return watch.failure is not None


def forget_report(failure: str) -> None:
    found = re.search(r"report written to (\S+\.json)", failure)
    assert found is not None
    Path(found[1]).unlink()


@contextmanager
def kept_parameters() -> Iterator[list[npt.NDArray[np.uint8]]]:
    """The memory that parameters are read into from now on, with the bytes that they have in their files."""
    made: list[npt.NDArray[np.uint8]] = []

    def kept(size: int) -> npt.NDArray[np.uint8]:
        made.append(empty_bytes(size))
        return made[-1]

    with patch.object(parameters_module, "empty_bytes", kept):
        yield made
