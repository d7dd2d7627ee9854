from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shortfin_apps.llm.cli import COMMANDS
from shortfin_apps.llm.components.batching import BATCH_MODES
from shortfin_apps.llm.terminal.completion import SHELLS, script

pytestmark = pytest.mark.slow

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function_=$(complete -p shortfin-llm); function_=${function_##*-F }
"${function_% *}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
PARSE = {"bash": ["bash", "-n"], "zsh": ["zsh", "-n"], "fish": ["fish", "--no-execute"]}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    code = "from shortfin_apps.llm.cli import main; main(['completion', {!r}])"
    files = {}
    for shell in SHELLS:
        files[shell] = folder / shell
        done = subprocess.run(
            [sys.executable, "-c", code.format(shell)], capture_output=True, text=True, check=True
        )
        files[shell].write_text(done.stdout)
    return files


def shell_path(shell: str) -> str:
    if (found := shutil.which(shell)) is None:
        pytest.skip(f"this machine has no {shell}")
    return found


def completed(scripts: dict[str, Path], *words: str) -> list[str]:
    bash = shell_path("bash")
    command = [bash, "--norc", "-c", COMPLETE, "bash", str(scripts["bash"]), "shortfin-llm", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]}
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_parses(scripts: dict[str, Path], shell: str, tmp_path: Path) -> None:
    command = [shell_path(shell), *PARSE[shell][1:], str(scripts[shell])]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "HOME": str(tmp_path)}
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_bash_completes_commands(scripts: dict[str, Path]) -> None:
    assert set(completed(scripts, "")) == set(COMMANDS)
    assert completed(scripts, "ser") == ["serve"]


def test_bash_completes_options_and_their_values(scripts: dict[str, Path]) -> None:
    assert set(completed(scripts, "serve", "--batch-mode", "")) == {"auto", *BATCH_MODES}
    assert completed(scripts, "serve", "--batch-mode", "ext") == ["extend-attention"]
    assert "--batch-mode" in completed(scripts, "serve", "--batch")
    assert completed(scripts, "completion", "") == list(SHELLS)
    assert "--entry" in completed(scripts, "bench", "roofline", "--en")


def test_bash_completes_files(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert completed(scripts, "serve", f"{tmp_path}/mo") == [f"{tmp_path}/model"]
    assert completed(scripts, "generate", "--file", f"{tmp_path}/mo") == [f"{tmp_path}/model"]


def test_fish_completes_values(scripts: dict[str, Path], tmp_path: Path) -> None:
    fish = shell_path("fish")
    code = f"source {scripts['fish']}; complete -C 'shortfin-llm serve --batch-mode '"
    done = subprocess.run(
        [fish, "--no-config", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert {line.split("\t")[0] for line in done.stdout.splitlines()} == {"auto", *BATCH_MODES}


def test_hidden_spellings_are_not_completed() -> None:
    assert "--batch_mode" not in script("bash")
