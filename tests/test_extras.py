"""Only the extras' own features need the extras."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from shortfin_apps.llm.contract.errors import EXTRA_OF, missing_extra

ROOT = Path(__file__).parents[1]
WITHOUT = f"import sys; sys.modules.update(dict.fromkeys({sorted(EXTRA_OF)!r}))\n"
SERVING = [
    *("serving.server.command", "serving.server.http_server", "serving.server.engine_process"),
    *("serving.server.api_process", "offline.llm", "serving.loading", "components.runtime.vmfb", "client"),
    *("offline.batch.command", "tools.inspection.report", "tools.replay.cli"),
    "tools.bench.roofline.run",  # of a program for CPUs, without --profile
]


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` where no extra is installed: importing its modules fails."""
    command = [sys.executable, "-c", WITHOUT + code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_serving_imports_no_extra() -> None:
    done = python("\n".join(f"import shortfin_apps.llm.{module}" for module in SERVING))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["generate", "a"], "terminal"),
        (["chat"], "terminal"),
        (["top"], "terminal"),
        (["bench"], "terminal"),
        (["completion", "bash"], "terminal"),
        (["list"], "build"),
        (["build", "random:tiny"], "build"),
    ],
)
def test_a_command_says_which_extra_it_needs(arguments: list[str], extra: str) -> None:
    done = python(f"from shortfin_apps.llm.cli import main; sys.exit(main({arguments!r}))")
    assert done.returncode == 2
    assert re.fullmatch(rf"error: this needs \w+: run `pip install 'shortfin-llm\[{extra}\]'`\n", done.stderr)


def test_other_missing_modules_are_bugs() -> None:
    assert missing_extra(ModuleNotFoundError(name="numpy")) is None
    assert missing_extra(ModuleNotFoundError()) is None


def test_each_module_is_installed_by_its_extra() -> None:
    installed = packages_distributions()  # without editable ones
    requirements = [Requirement(text) for text in requires("shortfin-llm") or []]
    for module, extra in EXTRA_OF.items():
        distributions = {name.lower().replace("_", "-") for name in installed.get(module, [module])}
        of_extra = {
            each.name.lower().replace("_", "-")
            for each in requirements
            if each.marker is not None and each.marker.evaluate({"extra": extra})
        }
        assert distributions & of_extra, f"{module} is not installed by {extra}"
