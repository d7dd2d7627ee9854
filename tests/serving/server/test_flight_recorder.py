from __future__ import annotations

import asyncio
import os
import signal

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.recorder.dumps import WrittenDump
from shortfin_apps.llm.serving.server import flight_recorder
from shortfin_apps.llm.serving.server.flight_recorder import dump_at_signal, dump_header
from tests.serving.api.harness import Harness
from tests.serving.server.settings import parse


def test_dumps_name_the_files_that_were_served_and_no_secret(tiny_artifact: Artifact) -> None:
    options = dump_header(tiny_artifact, parse("DIR", "--api-key", "secret", "--dump-dir", "/d"))
    assert set(options.files) == {"model.vmfb", "model.irpa"}
    assert "shortfin-llm" in options.versions
    assert "secret" not in repr(options)


async def test_sigusr1_dumps_once_there_is_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    engine = Harness().engine
    engines = [None, engine]
    dump_at_signal(lambda: engines[0])
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        async with asyncio.timeout(20):
            while "still loading" not in caplog.text:
                await asyncio.sleep(0)
        del engines[0]
        os.kill(os.getpid(), signal.SIGUSR1)
        async with asyncio.timeout(20):
            while "no space is left" not in caplog.text:
                await asyncio.sleep(0)
        assert engine.dumps == ["SIGUSR1"]
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)


async def test_a_bug_in_a_dump_at_sigusr1_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Harness().engine

    async def fail(reason: str) -> WrittenDump:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine, "dump", fail)
    await flight_recorder._dump(engine)
    assert "SIGUSR1: a bug" in caplog.text
