"""Standard streams that the caller has closed."""

from __future__ import annotations

import subprocess
import sys

import pytest

ALL = "<&- >&- 2>&-"
CLI = "from shortfin_apps.llm.cli import main; arguments = ['completion', 'bash']"
SERVER = "from shortfin_apps.llm.serving.server.command import main; arguments = ['/nowhere']"


@pytest.mark.parametrize(
    ("command", "status", "closed"),
    [(CLI, 0, ">&-"), (CLI, 0, "2>&-"), (CLI, 0, ALL), (SERVER, 2, ALL)],
    ids=["stdout", "stderr", "all", "server"],
)
def test_closed_standard_streams_are_dev_null(command: str, status: int, closed: str) -> None:
    code = (
        f"import os, sys; {command}; status = main(arguments);"
        " [os.fstat(number) for number in range(3)]; sys.exit(status)"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (status, b"")
