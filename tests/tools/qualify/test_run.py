"""Checks that hang or end their process are failures, and others go on in another process."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from shortfin_apps.llm.tools.qualify import run
from shortfin_apps.llm.tools.qualify.bench import Plan
from shortfin_apps.llm.tools.qualify.check import Check
from shortfin_apps.llm.tools.qualify.outcome import Fault, Outcome, Passed, Status
from shortfin_apps.llm.tools.qualify.run import run_checks

# What the worker does at the check of each name; it counts its checks.
SCRIPT = """
import json, os, signal, sys, threading, faulthandler
faulthandler.register(signal.SIGUSR1, all_threads=True)
out = os.fdopen(int(sys.argv[1]), "w")
for count, line in enumerate(sys.stdin):
    asked = json.loads(line)
    name = asked["check"]
    if name.startswith("hang"):
        def waits_for_the_device():
            threading.Event().wait()
        waits_for_the_device()
    if name.startswith("crash"):
        print("the driver freed it twice", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGABRT)
    if name.startswith("exit"):
        sys.exit(3)
    if name.startswith("ends us"):
        os.kill(os.getppid(), getattr(signal, name.split()[-1]))
        threading.Event().wait()
    text = f"check {count} of this process, {asked['limit_s']:.0f} s"
    found = {"name": name, "status": "pass", "text": text, "seconds": 0.1, "fault": None, "figures": {}}
    print(json.dumps(found), file=out, flush=True)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "worker.py").write_text(SCRIPT)
    return [sys.executable, str(tmp_path / "worker.py")]


def outcomes_of(command: list[str], *names: str) -> list[Outcome]:
    checks = [Check(name, "", lambda bench: Passed("")) for name in names]
    shown: list[Outcome] = []
    found = run_checks(checks, Plan("random:tiny", "cpu"), shown.append, 600.0, command)
    assert shown == found
    return found


def test_the_others_go_on_in_another_process(command: list[str]) -> None:
    a, b, crash, c, d = outcomes_of(command, "a", "b", "crash", "c", "d")
    assert [each.status for each in (a, b, crash, c, d)] == ["pass", "pass", "fail", "pass", "pass"]
    assert [each.text[:7] for each in (a, b, c, d)] == ["check 0", "check 1", "check 0", "check 1"]
    assert crash.fault is Fault.CRASH
    assert "SIGABRT" in crash.text
    assert "freed it twice" in crash.figures["log"]


def test_a_check_that_hangs_is_ended_with_its_stacks(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "MIN_LIMIT_S", 0.0)
    monkeypatch.setattr(run, "GRACE_S", 0.5)
    checks = [Check("hang", "", lambda bench: Passed(""))]
    [hang] = run_checks(checks, Plan("random:tiny", "cpu"), lambda each: None, 1.0, command)
    assert hang.fault is Fault.HANG
    assert hang.text == "gave no result within 1 s"
    assert "waits_for_the_device" in hang.figures["log"]


def test_an_exit_status_is_told(command: list[str]) -> None:
    [outcome] = outcomes_of(command, "exit")
    assert outcome.text == "ended the process: exit status 3"


def test_it_gives_up_after_two_in_a_row(command: list[str]) -> None:
    found = outcomes_of(command, "a", "crash1", "b", "crash2", "crash3", "c")
    assert [each.status for each in found] == ["pass", "fail", "pass", "fail", "fail", "skipped"]
    assert found[-1].status is Status.SKIPPED


def test_unused_time_goes_to_later_checks(command: list[str]) -> None:
    limits = [int(each.text.split(", ")[1].split()[0]) for each in outcomes_of(command, *"abcdef")]
    assert limits[0] in (99, 100)
    assert limits[1] in range(117, 121)  # a fifth of what the first has left
    assert limits[-1] == run.MAX_LIMIT_S


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_worker_and_leaves_the_outcomes(name: str, command: list[str]) -> None:
    checks = [Check(each, "", lambda bench: Passed("")) for each in ("a", f"ends us by {name}", "b")]
    shown: list[Outcome] = []
    before = signal.getsignal(signal.SIGTERM)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_checks(checks, Plan("random:tiny", "cpu"), shown.append, 600.0, command)
    assert [each.name for each in shown] == ["a"]
    assert time.monotonic() - begin < run.END_S  # it is not waited for
    assert signal.getsignal(signal.SIGTERM) is before
