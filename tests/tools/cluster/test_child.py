"""What a child does when its parent ends, in processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

# Starts a child that prints its id and sleeps, and waits for a signal itself.
PARENT = """
import os, subprocess, sys
module = "shortfin_apps.llm.tools.cluster.child"
child = [sys.executable, "-m", module, str(os.getpid()), "tests.tools.cluster.sleeper"]
subprocess.Popen(child).wait()
"""


def test_a_child_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.readline() == "SIGTERM\n"
        parent.stdout.read()  # ends when the last writer, the child, has ended


def test_a_child_of_a_parent_that_has_ended_does_not_start() -> None:
    command = [
        sys.executable,
        "-m",
        "shortfin_apps.llm.tools.cluster.child",
        "1000000000",
        "tests.tools.cluster.sleeper",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stdout == ""


def test_the_module_sees_its_own_words() -> None:
    command = [sys.executable, "-m", "shortfin_apps.llm.tools.cluster.child", str(os.getpid())]
    done = subprocess.run(
        [*command, "shortfin_apps.llm", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.startswith("shortfin-llm ")
