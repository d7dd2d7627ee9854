"""What a worker's limits are is tested where they are used: grammars' trials and chat templates."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from shortfin_apps.llm import limited_process
from shortfin_apps.llm.limited_process import Answers, LimitedProcess, Limits, Workers, arguments_of

pytestmark = pytest.mark.timeout(60)


def test_limits_are_arguments() -> None:
    limits = Limits(cpu_s=1.0, wall_s=2.0, memory_bytes=3)
    assert Limits(*arguments_of(limits)) == limits


def test_a_process_that_ends_at_once_has_no_workers() -> None:
    process = LimitedProcess("shortfin_apps.llm.no_such_module")
    process.process.wait()
    assert process.is_over
    with pytest.raises(OSError, match="pipe"):
        process.new_worker()


def test_closing_ends_the_process() -> None:
    process = LimitedProcess("shortfin_apps.llm.serving.text.template_process", [1.0, 1.0])
    process.close()
    assert process.is_over


def test_data_that_arrives_during_the_work_does_not_end_it() -> None:
    """The kernel signals data after it has handed it out: a busy machine has a worker begin before that."""
    process = LimitedProcess("shortfin_apps.llm.serving.text.template_process", [10.0, 20.0])
    with process.new_worker() as worker, worker.makefile("rb") as answers:
        worker.sendall(b'"{% for i in range(300) %}{% for j in range(1000) %}{% endfor %}{% endfor %}x"\n')
        assert [answers.readline() for _ in range(2)] == [b"null\n", b'["", null]\n']
        worker.sendall(b"[[], false, {}]\n")
        assert answers.readline() == b"null\n"  # it works
        worker.sendall(b"null\n")
        assert [answers.readline() for _ in range(3)] == [b'["x", null]\n', b"null\n", b'["", null]\n']
    process.close()


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "working"])
def test_a_worker_ends_when_its_connection_is_closed(is_idle: bool) -> None:
    process = LimitedProcess("shortfin_apps.llm.serving.text.template_process", [60.0, 60.0])
    worker = process.new_worker()
    answers = worker.makefile("rb")
    worker.sendall(b'"{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"\n')
    assert [answers.readline() for _ in range(2)] == [b"null\n", b'["", null]\n']
    if not is_idle:
        worker.sendall(b"[[], false, {}]\n")
        assert answers.readline() == b"null\n"
    [pid] = Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children").read_text().split()
    ending = os.pidfd_open(int(pid))
    answers.close()
    worker.close()
    assert select.select([ending], [], [], 30)[0]  # before its limits
    os.close(ending)
    process.close()


LIMITS = Limits(cpu_s=1.0, wall_s=0.01)
Ask = Callable[[Workers, Callable[[], socket.socket]], Answers]


class Peers:
    """Workers that have sent their answers before they are asked, and then have ended or are stopped."""

    def __init__(self) -> None:
        self.connections: list[socket.socket] = []

    def new(self, answers: bytes, ended: bool) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.sendall(answers)
        self.connections += ours, theirs
        if ended:
            theirs.shutdown(socket.SHUT_WR)
        return ours


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    monkeypatch.setattr(limited_process, "SLACK_S", 0.0)
    peers = Peers()
    yield peers
    for each in peers.connections:
        each.close()


@pytest.fixture(params=["thread", "loop"])
def ask(request: pytest.FixtureRequest) -> Ask:
    if request.param == "thread":
        return lambda workers, begin: workers.ask(b"1\n", begin)
    return lambda workers, begin: asyncio.run(workers.ask_in_loop(b"1\n", begin))


BLAMED = {
    "it ends at a limit": b"null\n",
    "it is killed as it answers": b"null\n[1",
}


@pytest.mark.parametrize("sent", BLAMED.values(), ids=BLAMED.keys())
def test_work_that_hits_a_limit_ends_its_worker(peers: Peers, ask: Ask, sent: bytes) -> None:
    workers = Workers("tests", LIMITS, lambda: 0.0)
    worker = peers.new(sent, ended=True)
    assert ask(workers, lambda: worker) == [None]
    assert worker.fileno() == -1
    assert not workers.idle


@pytest.mark.parametrize("sent", [b"", b"null\n"], ids=["not begun", "begun"])
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "stopped"])
def test_an_idle_worker_that_was_suspended_is_replaced(
    peers: Peers, ask: Ask, sent: bytes, ended: bool
) -> None:
    """For the clock an hour passes between two looks at it."""
    hours = count(step=3600)
    workers = Workers("tests", LIMITS, lambda: float(next(hours)))
    suspended, fresh = peers.new(sent, ended), peers.new(b'null\n"result"\n', False)
    workers.idle.append(suspended)
    assert ask(workers, lambda: fresh) == [None, "result"]
    assert suspended.fileno() == -1
    assert workers.idle == [fresh]


def test_a_suspension_before_the_first_answer_came_is_noticed(peers: Peers, ask: Ask) -> None:
    """Both answers of the kernel's are then read at once."""
    times = iter([0.0, 3600.0, 3600.0])
    workers = Workers("tests", LIMITS, lambda: next(times))
    assert ask(workers, lambda: peers.new(b"null\n", True)) == []


def test_nothing_is_known_where_no_worker_can_be_started(
    peers: Peers, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> socket.socket:
        raise BlockingIOError("no more processes")

    workers = Workers("tests", LIMITS)
    workers.idle.append(peers.new(b"", ended=True))
    assert ask(workers, refuse) == []
    assert "tests: no worker can be started: no more processes" in caplog.text


def test_idle_workers_end_with_their_owner(peers: Peers) -> None:
    workers = Workers("tests", LIMITS)
    workers.idle.append(worker := peers.new(b"", False))
    del workers
    assert worker.fileno() == -1
