"""Invocations are started in order, on another thread, and their failures are reported by `wait`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from shortfin_apps.llm.components.runtime.device import DeviceBuffer
from shortfin_apps.llm.components.runtime.launch_queue import LaunchQueue
from shortfin_apps.llm.contract.errors import InvocationError

TIMEOUT_S = 20.0


class Started:
    """A pending invocation without results, which may have failed."""

    def __init__(self, error: InvocationError | None = None, *, done: bool = True) -> None:
        self.error = error
        self.done = done

    def results(self) -> Sequence[DeviceBuffer]:
        return self.wait()

    def wait(self) -> Sequence[DeviceBuffer]:
        if self.error is not None:
            raise self.error
        return ()


@pytest.fixture
def queue() -> Iterator[LaunchQueue]:
    made = LaunchQueue("test")
    yield made
    made.close()


def test_starts_in_order_on_one_other_thread(queue: LaunchQueue) -> None:
    started: list[tuple[int, str]] = []

    def start(number: int) -> Started:
        started.append((number, threading.current_thread().name))
        return Started()

    for pending in [queue.add(lambda number=number: start(number)) for number in range(50)]:  # type: ignore[misc]
        assert pending.wait() == ()
    assert started == [(number, "test") for number in range(50)]


def test_add_returns_while_the_driver_is_busy(queue: LaunchQueue) -> None:
    free = threading.Event()

    def start_slowly() -> Started:
        assert free.wait(TIMEOUT_S)
        return Started()

    first, second = queue.add(start_slowly), queue.add(Started)
    free.set()  # which a caller that had waited in `add` would never have reached
    assert first.wait() == second.wait() == ()


def test_the_caller_waits_for_the_start_on_an_idle_device(queue: LaunchQueue) -> None:
    for _ in range(50):
        pending = queue.add(Started)
        assert not pending._not_begun.locked()
        assert pending.wait() == ()


def test_it_does_not_wait_on_a_busy_device(queue: LaunchQueue) -> None:
    free = threading.Event()

    def start_slowly() -> Started:
        assert free.wait(TIMEOUT_S)
        return Started()

    running = queue.add(lambda: Started(done=False))
    assert running.wait() == ()
    others = [queue.add(start_slowly), queue.add(Started)]
    free.set()
    assert [each.wait() for each in others] == [()] * 2


def test_drain_returns_once_all_are_started(queue: LaunchQueue) -> None:
    started: list[int] = []

    def start(number: int) -> Started:
        started.append(number)
        return Started()

    for number in range(50):
        queue.add(lambda number=number: start(number))  # type: ignore[misc]
    queue.drain()
    assert started == list(range(50))


def test_failures_are_reported_by_each_wait_and_end_nothing_else(queue: LaunchQueue) -> None:
    failed = queue.add(lambda: Started(InvocationError("no memory")))
    following = queue.add(Started)
    for method in (failed.results, failed.wait, failed.wait):
        with pytest.raises(InvocationError, match="no memory"):
            method()
    assert following.wait() == ()


def test_what_an_invocation_uses_is_freed_once_it_was_started(queue: LaunchQueue) -> None:
    """Arguments belong to the started invocation, which frees them when it is over."""

    class Argument:
        def __init__(self, freed: threading.Event) -> None:
            self.freed = freed

        def __del__(self) -> None:
            self.freed.set()

    freed = threading.Event()
    argument = Argument(freed)
    pending = queue.add(lambda kept=argument: Started())  # type: ignore[misc]
    del argument
    pending.wait()
    assert freed.wait(TIMEOUT_S)


def test_close_starts_what_was_added_and_ends_the_thread() -> None:
    queue = LaunchQueue("closed")
    pending = [queue.add(Started) for _ in range(5)]
    queue.close()
    assert [each.wait() for each in pending] == [()] * 5
    assert "closed" not in {thread.name for thread in threading.enumerate()}
