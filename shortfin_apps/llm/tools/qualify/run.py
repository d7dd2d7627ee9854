"""Runs checks in a worker process, and goes on with another one if a check hangs or ends the process.

A GPU that hangs may hold its thread in the driver for ever, and the driver may end the process when it cleans
up after an error. Therefore no check runs in the process that writes the report.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from shortfin_apps.llm.tools.qualify.bench import Plan
from shortfin_apps.llm.tools.qualify.check import Check
from shortfin_apps.llm.tools.qualify.outcome import Fault, Outcome, Status

TOTAL_S = 600.0
MIN_LIMIT_S = 10.0  # also for the last checks, if others took all of the time
MAX_LIMIT_S = 200.0  # also for the only check
GRACE_S = 5.0  # for the answer of a check that watches its own limit
STACKS_S, END_S = 1.0, 10.0  # for the stacks of a worker that hangs; for the end of one without work
TAIL_BYTES = 4000  # of a worker's log, in the report
PIECE_BYTES = 65536
MAX_DEATHS = 2  # checks in a row that hang or end the process; further ones would do the same

GIVEN_UP = f"{MAX_DEATHS} checks in a row hung or ended their process"

WORKER = (sys.executable, "-m", "shortfin_apps.llm.tools.qualify.worker")


class Died(Exception):
    """The worker gave no outcome: it hung and was killed, or it ended."""

    def __init__(self, fault: Fault, text: str, log: str) -> None:
        super().__init__(text)
        self.fault = fault
        self.log = log


class Worker:
    """A worker process. Callers must call `close`."""

    def __init__(self, command: Sequence[str], plan: Plan) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._answers, theirs = os.pipe()
        self._process = subprocess.Popen(
            [*command, str(theirs), json.dumps(asdict(plan))],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[theirs],
        )
        os.close(theirs)
        self._partial = b""

    def ask(self, check: Check, limit_s: float) -> Outcome:
        """Run a check. Raises Died if there is no outcome within its limit."""
        assert self._process.stdin is not None
        self._log.seek(0, os.SEEK_END)
        begin = self._log.tell()
        try:
            question = json.dumps({"check": check.name, "limit_s": limit_s})
            self._process.stdin.write(question.encode() + b"\n")
            self._process.stdin.flush()
            line = self._line(limit_s + GRACE_S)
        except BrokenPipeError:
            line = b""
        if line is None:
            self._process.send_signal(signal.SIGUSR1)
            self._wait(STACKS_S)
            raise Died(Fault.HANG, f"gave no result within {limit_s:.0f} s", self._tail(begin))
        if not line:
            status = self._wait(END_S)
            raise Died(Fault.CRASH, f"ended the process: {_ending(status)}", self._tail(begin))
        return _outcome(json.loads(line))

    def close(self) -> None:
        """End the process; kill it if it does not end by itself."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._process.poll() is None and self._wait(END_S) is None:
            self.kill()
        self.release()

    def release(self) -> None:
        """Close the files of a process that was killed."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._answers)
        self._log.close()

    def kill(self) -> None:
        """Kill the process. The driver may keep it for ever if the GPU hangs: then it is left behind."""
        self._process.kill()
        self._wait(END_S)

    def _line(self, timeout_s: float) -> bytes | None:
        """Return the next line of the worker; empty if it has ended, None if none came in time."""
        end = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._partial:
                if not selector.select(max(0.0, end - time.monotonic())):
                    return None
                if not (piece := os.read(self._answers, PIECE_BYTES)):
                    return b""
                self._partial += piece
        line, _, self._partial = self._partial.partition(b"\n")
        return line

    def _wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def _tail(self, begin: int) -> str:
        """Return the end of what the worker has logged since `begin`."""
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(begin, end - TAIL_BYTES))
        return self._log.read().decode(errors="replace")


def run_checks(
    checks: Sequence[Check],
    plan: Plan,
    on_outcome: Callable[[Outcome], None],
    total_s: float = TOTAL_S,
    command: Sequence[str] = WORKER,
) -> list[Outcome]:
    """Run the checks in order, within about `total_s` and the time for a soak; return their outcomes.

    A check may take its share of the time that is left. KeyboardInterrupt, which SIGTERM raises too, ends the
    worker at once and is raised.
    """
    with _interrupted_by_sigterm():
        return _run_in_order(checks, plan, on_outcome, total_s, command)


def _run_in_order(
    checks: Sequence[Check],
    plan: Plan,
    on_outcome: Callable[[Outcome], None],
    total_s: float,
    command: Sequence[str],
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    end = time.monotonic() + total_s
    num_deaths = 0
    worker: Worker | None = None
    try:
        for number, check in enumerate(checks):
            if num_deaths == MAX_DEATHS:
                outcomes.append(Outcome(check.name, Status.SKIPPED, GIVEN_UP, 0.0))
                on_outcome(outcomes[-1])
                continue
            left_s = end - time.monotonic()
            shares = sum(each.share for each in checks[number:] if not each.is_optional)
            limit_s = left_s * check.share / max(shares, check.share)
            limit_s = min(max(MIN_LIMIT_S, limit_s), MAX_LIMIT_S)
            if check.is_optional:
                limit_s = 60 * plan.soak_minutes + 60
            worker = worker or Worker(command, plan)
            outcome = _asked(worker, check, limit_s)
            num_deaths = num_deaths + 1 if outcome.fault in (Fault.HANG, Fault.CRASH) else 0
            if num_deaths:
                worker.kill()
                worker.release()
                worker = None
            outcomes.append(outcome)
            on_outcome(outcome)
    except KeyboardInterrupt:
        if worker is not None:
            worker.kill()
        raise
    finally:
        if worker is not None:
            worker.close()
    return outcomes


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM during the context, if this thread handles signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _asked(worker: Worker, check: Check, limit_s: float) -> Outcome:
    begin = time.monotonic()
    try:
        return worker.ask(check, limit_s)
    except Died as died:
        seconds = time.monotonic() - begin
        figures = {"log": died.log}
        return Outcome(check.name, Status.FAILED, str(died), seconds, died.fault, figures)


def _outcome(found: dict[str, Any]) -> Outcome:
    fault = None if found["fault"] is None else Fault(found["fault"])
    return Outcome(**{**found, "status": Status(found["status"]), "fault": fault})


def _ending(status: int | None) -> str:
    if status is None:
        return "it closed its connection"
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"
