"""`shortfin-llm generate`: continues a text and prints the continuation as it arrives."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import aclosing
from pathlib import Path

from shortfin_apps.llm.console import visible
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.lone_surrogates import encodable
from shortfin_apps.llm.terminal.options import (
    add_sampling_options,
    add_server_options,
    open_client,
    sampling_from,
)
from shortfin_apps.llm.terminal.printing import StreamedAnswer

DESCRIPTION = """\
Continues a text with a served model, without a chat template (`shortfin-llm chat` applies one), and prints
the continuation as it arrives. Only the continuation goes to stdout."""
EPILOG = """\
examples:
  shortfin-llm generate "The capital of France is" -n 8 -t 0
  shortfin-llm generate --file story.txt --temperature 0.8 --seed 7 --stats
  git log -1 | shortfin-llm generate - --stop "."
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("prompt", nargs="?", help="the text; `-`, or no argument in a pipe, reads stdin")
    source.add_argument("-f", "--file", type=Path, metavar="FILE", help="read the text from a file")
    parser.add_argument("--stats", action="store_true", help="token counts and times on stderr afterwards")
    add_server_options(parser)
    add_sampling_options(parser, max_tokens=256)


def run(args: argparse.Namespace) -> int:
    answer = StreamedAnswer()
    asyncio.run(_generate(read_prompt(args.prompt, args.file), args, answer))
    if args.stats:
        print(visible(answer.summary()), file=sys.stderr)
    return 0


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the text of the argument, the file or stdin. Raises InvalidRequestError without a text."""
    if file is not None:
        return _read_file(file)
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = _read_stdin()
    if not prompt:
        raise InvalidRequestError(
            "there is no text to continue; give it as an argument, with --file, or on stdin", "prompt"
        )
    return encodable(prompt)


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise InvalidRequestError("stdin is not UTF-8 text", "prompt") from None


def _read_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{file} is not UTF-8 text", "file") from None
    except OSError as error:
        raise InvalidRequestError(f"cannot read {file}: {error.strerror}", "file") from error


async def _generate(prompt: str, args: argparse.Namespace, answer: StreamedAnswer) -> None:
    async with open_client(args) as client, aclosing(client.stream(prompt, **sampling_from(args))) as chunks:
        await answer.show(chunks)
