"""`shortfin-llm chat`: a conversation with a served model."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import cast

from shortfin_apps.llm.client import LlmClient, Message, Sampling
from shortfin_apps.llm.console import PlainConsole, visible
from shortfin_apps.llm.contract.errors import InvalidRequestError, LlmError
from shortfin_apps.llm.lone_surrogates import encodable
from shortfin_apps.llm.terminal.commands import COMMAND_HELP, Commands, is_command, without_escape
from shortfin_apps.llm.terminal.conversation import Conversation
from shortfin_apps.llm.terminal.markdown import StreamedMarkdown
from shortfin_apps.llm.terminal.options import (
    add_sampling_options,
    add_server_options,
    open_client,
    sampling_from,
)
from shortfin_apps.llm.terminal.printing import DIM, PLAIN, PlainText, StreamedAnswer, Writer

DESCRIPTION = """\
Chats with a served model: streams its answers and keeps the conversation. On a terminal, answers are
rendered as Markdown. Enter sends; Alt-Enter or Ctrl-J starts a new line; pasted text is one turn, even
with several lines. Ctrl-C stops an answer and keeps the text so far; Ctrl-D quits. Input is saved for Up
and Ctrl-R in ~/.local/state/shortfin-llm/chat_history (or in XDG_STATE_HOME), readable only by its owner.
If stdin is a pipe, each line is one turn, and only the answers are written to stdout."""
EPILOG = f"""\
in the conversation:
{COMMAND_HELP}

examples:
  shortfin-llm chat --system "Answer in one sentence." -t 0.7
  echo "What is the capital of France?" | shortfin-llm chat -t 0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--plain", action="store_true", help="print answers as plain text instead of rendered Markdown"
    )
    parser.add_argument("--no-history", action="store_true", help="do not save the input to a file")
    parser.add_argument(
        "--stats", action="store_true", help="token counts and times on stderr after each answer"
    )
    add_server_options(parser)
    add_sampling_options(parser, max_tokens=None)


def run(args: argparse.Namespace) -> int:
    with asyncio.Runner() as runner:
        client = open_client(args)
        try:
            Chat(runner, client, args).loop()
        finally:
            runner.run(client.aclose())
    return 0


def another_seed(sampling: Sampling, times: int) -> Sampling:
    """Return `sampling` with another seed: the given one plus `times`, or a random one if none is given."""
    is_random = sampling.get("seed", -1) == -1
    seed = secrets.randbits(31) if is_random else sampling["seed"] + times
    return cast(Sampling, {**sampling, "seed": seed})


class Chat:
    """Reads and answers turns in a synchronous loop, as there is nothing to do while the user types.

    If Ctrl-C is pressed during an answer, `asyncio.Runner` cancels the request, which disconnects.
    """

    def __init__(self, runner: asyncio.Runner, client: LlmClient, args: argparse.Namespace) -> None:
        self._runner = runner
        self._client = client
        self._interactive = sys.stdin.isatty()
        self._stats: bool = args.stats
        self._times_again = 0  # how often the last question's answer was regenerated
        self._writer = answer_writer(args.plain)
        self.conversation = Conversation(args.system)
        self.commands = Commands(self.conversation, sampling_from(args), self._say, self._regenerate)
        self._read = self._typed(not args.no_history) if self._interactive else input

    def _typed(self, keeps_history: bool) -> Callable[[], str]:
        # Imported here because input from a pipe does not need prompt_toolkit.
        from prompt_toolkit.history import InMemoryHistory

        from shortfin_apps.llm.terminal.prompt import Prompt, history_file, open_history

        history = open_history(history_file(), self._say) if keeps_history else InMemoryHistory()
        return Prompt(history, self.commands.names).read

    def loop(self) -> None:
        """Read and answer turns until the input ends or `/quit`. Raises LlmError if no server answers."""
        if self._interactive:
            self._greet()
        while not self.commands.done and (line := self._read_line()) is not None:
            if is_command(line):
                self.commands.run(line)
            elif line:
                self._turn(without_escape(line))

    def _greet(self) -> None:
        # Requested before the first turn, so that a missing server is reported at once.
        models = self._runner.run(self._client.models())
        print(f"{visible(', '.join(models))} at {self._client.base_url}; /help lists commands, Ctrl-D quits")

    def _read_line(self) -> str | None:
        """Read the next turn, without surrounding whitespace; return None at the end of the input."""
        while True:
            try:
                return encodable(self._read()).strip()
            except UnicodeDecodeError:
                raise InvalidRequestError("stdin is not UTF-8 text", "prompt") from None
            except EOFError:
                if self._interactive:
                    print()
                return None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print("\n(Ctrl-D or /quit quits)")

    def _turn(self, question: str) -> None:
        self._times_again = 0
        if text := self._answer(self.conversation.asking(question), self.commands.sampling):
            self.conversation.answered(question, text)

    def _regenerate(self) -> None:
        # The conversation keeps the old answer until the new one has text.
        messages = self.conversation.asking_again()
        self._times_again += 1
        if text := self._answer(messages, another_seed(self.commands.sampling, self._times_again)):
            self.conversation.answered_again(text)

    def _answer(self, messages: Sequence[Message], sampling: Sampling) -> str:
        """Request an answer, print it and return its text, or "" after an error.

        An answer stopped by Ctrl-C is returned as far as it was printed.
        """
        answer = StreamedAnswer(writer=self._writer)
        try:
            self._runner.run(self._stream(messages, sampling, answer))
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            print("(stopped)")
        except LlmError as error:
            if not self._interactive:
                raise
            print(visible(f"error: {error}"), file=sys.stderr)
            return ""
        self._show_figures(answer)
        return answer.text

    def _show_figures(self, answer: StreamedAnswer) -> None:
        if self._stats:
            print(visible(answer.summary()), file=sys.stderr)
        elif self._interactive and sys.stdout.isatty() and (figures := answer.figures()):
            print(f"{DIM}{figures}{PLAIN}")

    async def _stream(self, messages: Sequence[Message], sampling: Sampling, answer: StreamedAnswer) -> None:
        async with aclosing(self._client.stream_chat(messages, **sampling)) as chunks:
            await answer.show(chunks)

    def _say(self, text: str) -> None:
        # If stdin is a pipe, stdout must contain only answers.
        print(visible(text), file=sys.stdout if self._interactive else sys.stderr)


def answer_writer(plain: bool) -> Callable[[], Writer]:
    """Return a function that creates a writer: plain text, or Markdown on terminals that can redraw.

    `plain` always selects plain text.
    """
    console = PlainConsole()
    if plain or not console.is_terminal or console.is_dumb_terminal:
        return PlainText
    return lambda: StreamedMarkdown(console, asyncio.get_running_loop().call_later)
