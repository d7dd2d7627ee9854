"""Options shared by all commands that talk to a server."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, cast

from shortfin_apps.llm.client import Sampling
from shortfin_apps.llm.client.sending import DEFAULT_URL

if TYPE_CHECKING:
    from shortfin_apps.llm.client import LlmClient

API_KEY_VARIABLE = "SHORTFIN_LLM_API_KEY"


def add_address_options(group: argparse._ActionsContainer) -> None:
    """Add options for the server's address and API key."""
    group.add_argument("--url", default=DEFAULT_URL, help="the server's address (default: %(default)s)")
    group.add_argument(
        "--api-key",
        default=own_key(),
        help=f"sent as a bearer token (default: the first of ${API_KEY_VARIABLE})",
    )


def add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    add_address_options(group)
    group.add_argument("--model", help="the model to use, if the server has several")
    group.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="maximum seconds without data from the server (default: %(default)g)",
    )


def own_key() -> str | None:
    """Return the first API key in the environment variable, or None. A server's variable may list several."""
    return os.environ.get(API_KEY_VARIABLE, "").partition(",")[0].strip() or None


def open_client(args: argparse.Namespace) -> LlmClient:
    from shortfin_apps.llm.client import LlmClient  # imports httpx, of an extra

    # Only one quick retry, as a user is waiting.
    return LlmClient(args.url, args.api_key, model=args.model, timeout_s=args.timeout, max_retries=1)


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """Add options with the field names of `Sampling` as destinations; `max_tokens` is a default."""
    group = parser.add_argument_group("sampling", "the server has defaults for options that are not given")
    group.add_argument(
        "-n",
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"maximum tokens of the answer (default: {max_tokens or 'as many as the context allows'})",
    )
    group.add_argument("--min-tokens", type=int, metavar="N", help="minimum tokens of the answer")
    group.add_argument("-t", "--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="keep the likeliest tokens up to a total of P"
    )
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens; 0 is off")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the likeliest")
    group.add_argument("--seed", type=int, help="makes the answer reproducible")
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; repeatable")
    group.add_argument(
        "--stop-token-id",
        type=int,
        action="append",
        dest="stop_token_ids",
        metavar="ID",
        help="stop at this token; repeatable",
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="ignore end-of-sequence")
    group.add_argument("--cache-salt", metavar="SALT", help="share cached prefixes only under this salt")


def sampling_from(args: argparse.Namespace) -> Sampling:
    """Return the sampling parameters given on the command line, and parameters with a default."""
    chosen = {name: getattr(args, name, None) for name in Sampling.__annotations__}
    return cast(Sampling, {name: value for name, value in chosen.items() if value is not None})
