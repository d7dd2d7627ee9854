"""`shortfin-llm completion SHELL`: prints a script that completes commands, options and their values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import shtab

from shortfin_apps.llm.cli import COMMANDS, make_parser

SHELLS = ("bash", "zsh", "fish")
FILES = ("DIR", "FILE", "IN", "MODEL", "OUT", "PATH", "SOURCE", "YAML")  # `--help`'s placeholders for files
CHOICES = re.compile(r"\{([^{}]+)\}")

DESCRIPTION = """\
Prints a script for a shell that completes commands, options and their values. The script is
self-contained, so completion does not start this program; print it again after an upgrade."""
EPILOG = """\
examples:
  shortfin-llm completion bash > ~/.local/share/bash-completion/completions/shortfin-llm
  shortfin-llm completion zsh > ~/.zfunc/_shortfin-llm      # with fpath+=~/.zfunc before compinit in .zshrc
  shortfin-llm completion fish > ~/.config/fish/completions/shortfin-llm.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(args: argparse.Namespace) -> int:
    print(script(args.shell))
    return 0


def script(shell: str) -> str:
    """Return the script for one of SHELLS. Raises AddressSpaceError if a command cannot be imported."""
    parser = make_parser(COMMANDS)
    for action in _actions(parser):
        action.help = getattr(action, "full_help", action.help)  # `help` is hidden except for --help-all
        _describe(action)
    return shtab.complete(parser, shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield all arguments of a command and, recursively, of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)


def _describe(action: argparse.Action) -> None:
    """Derive the completion of an argument's value (choices or a file) from its placeholder in `--help`.

    Settings that pydantic checks have their choices in the placeholder (`{a,b}`) instead of `choices`.
    """
    if action.choices is not None or not isinstance(action.metavar, str):
        return
    if choices := CHOICES.fullmatch(action.metavar):
        action.choices = choices[1].split(",")
    elif action.type is Path or action.metavar in FILES:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
