"""`shortfin-llm chat`: a conversation with a served model."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from shortfin_apps.llm.cli import Subparsers
from shortfin_apps.llm.client import LlmClient, Message, Sampling
from shortfin_apps.llm.errors import LlmError
from shortfin_apps.llm.terminal.conversation import Conversation
from shortfin_apps.llm.terminal.options import (
    add_sampling_options,
    add_server_options,
    open_client,
    sampling_from,
)
from shortfin_apps.llm.terminal.printing import StreamedAnswer
from shortfin_apps.llm.terminal.prompt import Prompt

DESCRIPTION = """\
Talks to a served model, streaming its answers and remembering the conversation. Ctrl-C stops an answer,
Ctrl-D quits. A text pasted into a terminal is one turn, even with several lines. With stdin from a pipe, each
line is one turn and only the answers go to stdout."""
COMMAND_HELP = """\
  /reset            forget the conversation so far
  /system [TEXT]    set the system message and forget the conversation; without TEXT, drop it
  /save FILE        write the conversation as JSON, the body of a chat request
  /help             this list
  /exit             quit"""
EPILOG = f"""\
in the conversation:
{COMMAND_HELP}

examples:
  shortfin-llm chat --system "Answer in one sentence." -t 0.7
  echo "What is the capital of Japan?" | shortfin-llm chat -t 0
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk to a served model",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--stats", action="store_true", help="token counts and times on stderr after each answer"
    )
    add_server_options(parser)
    add_sampling_options(parser, max_tokens=None)


def run(args: argparse.Namespace) -> int:
    interactive = sys.stdin.isatty()
    with asyncio.Runner() as runner:
        client = open_client(args)
        try:
            chat = Chat(runner, client, sampling_from(args), args.system, interactive, args.stats)
            chat.loop()
        finally:
            runner.run(client.aclose())
    return 0


class Chat:
    """The loop that reads and answers turns. It is synchronous: it has nothing to do while the user types.

    `asyncio.Runner` turns Ctrl-C during an answer into a cancellation, which disconnects.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        client: LlmClient,
        sampling: Sampling,
        system: str | None,
        interactive: bool,
        stats: bool,
    ) -> None:
        self._runner = runner
        self._client = client
        self._sampling = sampling
        self._interactive = interactive
        self._prompt = Prompt() if interactive else None
        self._stats = stats
        self._done = False
        self.conversation = Conversation(system)

    def loop(self) -> None:
        """Reads and answers turns until the end of the input. Raises LlmError if no server answers."""
        if self._interactive:
            self._greet()
        while not self._done and (line := self._read_line()) is not None:
            if _is_command(line):
                self._command(line)
            elif line:
                self._turn(line)

    def _greet(self) -> None:
        # Requested before the first turn, so that a missing server is reported at once.
        models = self._runner.run(self._client.models())
        print(f"{', '.join(models)} at {self._client.base_url}; /help lists commands, Ctrl-D quits")

    def _read_line(self) -> str | None:
        """The next turn without surrounding whitespace; None at the end of the input."""
        while True:
            try:
                return (input() if self._prompt is None else self._prompt.read()).strip()
            except EOFError:
                if self._interactive:
                    print()
                return None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print("\n(Ctrl-D or /exit quits)")

    def _turn(self, question: str) -> None:
        answer = StreamedAnswer()
        try:
            self._runner.run(self._answer(self.conversation.asking(question), answer))
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            print("(stopped)")
        except LlmError as error:
            if not self._interactive:
                raise
            print(f"error: {error}", file=sys.stderr)
            return
        if answer.text:
            self.conversation.answered(question, answer.text)
        if self._stats:
            print(answer.summary(), file=sys.stderr)

    async def _answer(self, messages: Sequence[Message], answer: StreamedAnswer) -> None:
        async with aclosing(self._client.stream_chat(messages, **self._sampling)) as chunks:
            await answer.show(chunks)

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        match name:
            case "/exit" | "/quit":
                self._done = True
            case "/reset":
                self.conversation.reset()
                self._say("(forgotten)")
            case "/system":
                self.conversation = Conversation(argument or None)
                self._say("(system message set)" if argument else "(no system message)")
            case "/save":
                self._save(argument)
            case "/help":
                self._say(COMMAND_HELP)
            case _:
                self._say(f"unknown command {name}; the commands are\n{COMMAND_HELP}")

    def _save(self, name: str) -> None:
        if not name:
            self._say("/save needs a file name")
            return
        try:
            self.conversation.save(Path(name).expanduser())
        except OSError as error:
            self._say(f"cannot write {name}: {error.strerror}")
        else:
            self._say(f"(saved to {name})")

    def _say(self, text: str) -> None:
        # In a pipe, stdout has only the answers.
        print(text, file=sys.stdout if self._interactive else sys.stderr)


def _is_command(turn: str) -> bool:
    """Whether a turn is a command. A turn of several lines is pasted text, unless it is a system message."""
    return turn.startswith("/") and ("\n" not in turn or turn.startswith("/system "))
