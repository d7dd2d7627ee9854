"""Set-up steps that run once: each leaves a stamp, and runs again if its inputs have changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


class SetUpError(Exception):
    """A peer cannot be set up; the message says what to do."""


class Cache:
    """A directory kept between runs. `say` is called with the name of each started step."""

    def __init__(self, root: Path, say: Callable[[str], None]) -> None:
        self.root = root
        self.say = say
        (root / "stamps").mkdir(parents=True, exist_ok=True)

    def once(self, name: str, what: str, step: Callable[[], None]) -> None:
        """Run `step` unless it has run before with the same `what`, a description of its inputs."""
        if not self.is_done(name, what):
            self.say(f"{name}: {what}")
            step()
            self._stamp(name).write_text(what, encoding="utf-8")

    def is_done(self, name: str, what: str) -> bool:
        """Whether `once` would do nothing."""
        stamp = self._stamp(name)
        return stamp.exists() and stamp.read_text(encoding="utf-8") == what

    def _stamp(self, name: str) -> Path:
        return self.root / "stamps" / name

    def run(
        self, log: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None
    ) -> None:
        """Run a long command at the lowest priority; its output is written to `logs/`.

        Raises SetUpError if it fails.
        """
        file = self.root / "logs" / f"{log}.log"
        file.parent.mkdir(exist_ok=True)
        with file.open("ab") as output:
            done = subprocess.run(
                ["nice", "-n", "19", *map(str, command)],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode:
            raise SetUpError(
                f"{Path(command[0]).name} failed (exit {done.returncode}); its output is in {file}"
            )

    def bin_of(self, name: str) -> Path:
        """Return the directory of executables of the virtual environment `name`."""
        return self.root / name / "venv" / "bin"

    def make_virtual_environment(
        self, name: str, requirements: Sequence[str], python: str = sys.executable
    ) -> None:
        """Create the environment from scratch with these packages. Raises SetUpError."""
        programs = self.bin_of(name)
        self.run(name, [python, "-m", "venv", "--clear", programs.parent])
        pip: list[str | Path] = [programs / "python", "-m", "pip", "install", "--disable-pip-version-check"]
        self.run(name, [*pip, *requirements])
