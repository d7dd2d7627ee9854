from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from shortfin_apps.llm.contract.errors import UnavailableError
from shortfin_apps.llm.offline.loop_thread import LoopThread


class Context:
    """What the loop runs within."""

    def __init__(self) -> None:
        self.is_inside = False

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False


@pytest.fixture
def context() -> Context:
    return Context()


@pytest.fixture
def thread(context: Context) -> Iterator[LoopThread]:
    thread = LoopThread(context)
    yield thread
    thread.stop()
    assert not context.is_inside


async def value() -> int:
    await asyncio.sleep(0)
    return 7


async def forever(begun: threading.Event, ended: threading.Event) -> None:
    try:
        begun.set()
        await asyncio.Event().wait()
    finally:
        ended.set()


def test_a_coroutine_runs_within_the_context(thread: LoopThread, context: Context) -> None:
    assert context.is_inside
    assert thread.run(value()) == 7


def test_an_error_is_raised_unchanged(thread: LoopThread) -> None:
    async def failing() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        thread.run(failing())


async def test_it_runs_beside_a_running_loop(thread: LoopThread) -> None:
    assert thread.run(value()) == 7
    assert await asyncio.to_thread(thread.run, value()) == 7


def test_ctrl_c_ends_the_coroutine_before_it_is_raised(thread: LoopThread) -> None:
    ended = False

    async def interrupted() -> None:
        nonlocal ended
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended = True

    with pytest.raises(KeyboardInterrupt):
        thread.run(interrupted())
    assert ended
    assert thread.run(value()) == 7


def test_stopping_ends_what_runs_and_the_thread(context: Context) -> None:
    before = set(threading.enumerate())
    thread = LoopThread(context)
    begun, ended = threading.Event(), threading.Event()
    work = thread.work(forever(begun, ended))
    thread.begin(work)
    assert begun.wait(10)
    thread.stop()
    thread.stop()
    assert ended.is_set()
    with pytest.raises(UnavailableError, match="closed before there was an answer"):
        work.ended.result(10)
    with pytest.raises(UnavailableError, match="the model is closed"):
        thread.run(value())
    work.cancel()
    assert set(threading.enumerate()) <= before  # threads of other tests may end meanwhile


def test_whatever_is_started_while_it_stops_ends(context: Context) -> None:
    for _ in range(50):
        thread = LoopThread(context)
        stopping = threading.Thread(target=thread.stop)
        stopping.start()
        error = None
        while error is None:
            work = thread.work(value())
            thread.begin(work)
            error = work.ended.exception(10)
        assert isinstance(error, UnavailableError)
        stopping.join(10)
        assert not stopping.is_alive()


@pytest.mark.parametrize("stops", [False, True])
def test_what_is_cancelled_before_it_begins_ends(context: Context, stops: bool) -> None:
    thread = LoopThread(context)
    if stops:
        thread.stop()
    work = thread.work(value())
    work.cancel()
    with pytest.raises(UnavailableError):
        work.ended.result(10)
    thread.stop()


def test_an_error_of_the_context_is_raised_at_once() -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise KeyError("x")
        yield

    with pytest.raises(KeyError, match="x"):
        LoopThread(broken)
