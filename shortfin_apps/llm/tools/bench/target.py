"""Connects to the servers to measure, and tokenises their prompts."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from httpx_aiohttp import HttpxAiohttpClient

from shortfin_apps.llm.client import ConnectionFailedError, LlmClient, ServerError
from shortfin_apps.llm.client.client import LOOPBACK_WITHOUT_PROXY
from shortfin_apps.llm.client.sending import checked_timeout
from shortfin_apps.llm.contract.errors import InvalidRequestError, LlmError, is_library_error
from shortfin_apps.llm.tools.bench.workload import Tokenize, token_prompt, word_prompt

MakePrompt = Callable[[str, int, str, int], Awaitable[str | list[int]]]
"""Returns a prompt of `prefix_tokens + tokens` tokens; its prefix depends only on `prefix_seed`.

Arguments: seed, tokens, prefix_seed, prefix_tokens.
"""


def token_prompts(tokenize: Tokenize) -> MakePrompt:
    """Make prompts as token ids, of exact length."""

    async def prompt(seed: str, tokens: int, prefix_seed: str, prefix_tokens: int) -> list[int]:
        prefix = await token_prompt(prefix_seed, prefix_tokens, tokenize) if prefix_tokens else []
        return prefix + await token_prompt(seed, tokens, tokenize)

    return prompt


async def text_prompt(seed: str, tokens: int, prefix_seed: str, prefix_tokens: int) -> str:
    """Make a prompt as text of approximate length, for servers that do not accept token ids."""
    prefix = f"{word_prompt(prefix_seed, prefix_tokens)} " if prefix_tokens else ""
    return prefix + word_prompt(seed, tokens)


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure. `url` is its base URL without `/v1`, which `http` requests are relative to."""

    label: str
    url: str
    model: str | None
    http: httpx.AsyncClient
    make_prompt: MakePrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """Connection options. `model` None: the first model that the server lists.

    `tokenizer` None: prompts are tokenised by the server's `/tokenize`.
    """

    model: str | None = None
    api_key: str | None = None
    tokenizer: Path | None = None
    text_prompts: bool = False
    timeout_s: float = 600.0


def parse_urls(urls: Sequence[str]) -> list[tuple[str, str]]:
    """Parse label and URL from each `URL` or `LABEL=URL`; the default label is the URL without scheme.

    Raises InvalidRequestError when two servers have the same label.
    """
    pairs = [_parse_url(url) for url in urls]
    if len({label for label, _ in pairs}) < len(pairs):
        raise InvalidRequestError("two servers have the same label; name them as LABEL=URL", "url")
    return pairs


def _parse_url(url: str) -> tuple[str, str]:
    labelled = re.fullmatch(r"([\w.+-]+)=(https?://.*)", url)
    if labelled:
        return labelled[1], labelled[2]
    return url.removeprefix("http://").removeprefix("https://").rstrip("/"), url


@asynccontextmanager
async def open_target(label: str, url: str, options: TargetOptions) -> AsyncIterator[Target]:
    """Connect to a server and determine its model's name. Raises LlmError if the server is unusable."""
    async with LlmClient(url, options.api_key, timeout_s=30.0, max_retries=1) as client:
        base_url = client.base_url
        model = options.model or await _first_model(client)
    async with http_client(base_url, options.api_key, timeout_s=options.timeout_s) as http:
        yield Target(label, base_url, model, http, _make_prompt(http, model, options))


def http_client(base_url: str, api_key: str | None = None, *, timeout_s: float) -> httpx.AsyncClient:
    """Create an httpx client over aiohttp, without a limit on connections.

    httpx's own transport needs several times the CPU time per chunk, which would slow down a server on the
    same machine.
    """
    return HttpxAiohttpClient(
        base_url=base_url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        timeout=httpx.Timeout(checked_timeout(timeout_s), pool=None),
        limits=httpx.Limits(max_connections=0),  # aiohttp's value for no limit
        mounts=LOOPBACK_WITHOUT_PROXY,
    )


async def _first_model(client: LlmClient) -> str | None:
    try:
        return next(iter(await client.models()), None)
    except (InvalidRequestError, ServerError):
        return None  # a server without /v1/models may still accept requests without a model name


def _make_prompt(http: httpx.AsyncClient, model: str | None, options: TargetOptions) -> MakePrompt:
    if options.text_prompts:
        return text_prompt
    if options.tokenizer is not None:
        return token_prompts(file_tokenizer(options.tokenizer))
    return token_prompts(server_tokenizer(http, model))


def file_tokenizer(file: Path) -> Tokenize:
    """Return a tokenise function of a Hugging Face `tokenizer.json`.

    Raises InvalidRequestError if the file is unusable; so does the returned function if tokenising fails.
    """
    from tokenizers import Tokenizer  # imported only when it is used

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except BaseException as error:
        raise _unusable(file, error) from error

    async def tokenize(text: str) -> list[int]:
        try:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)
        except BaseException as error:
            raise _unusable(file, error) from error

    return tokenize


def _unusable(file: Path, error: BaseException) -> BaseException:
    """Convert an error of the tokenizer library to InvalidRequestError; return any other error unchanged."""
    if not is_library_error(error):
        return error
    return InvalidRequestError(f"{file} is not a usable tokenizer.json ({error})", "tokenizer")


def server_tokenizer(http: httpx.AsyncClient, model: str | None) -> Tokenize:
    """Return a tokenise function that calls the server's `/tokenize` in vLLM's or llama.cpp's format."""
    named = {} if model is None else {"model": model}

    async def tokenize(text: str) -> list[int]:
        vllm = await _tokens(http, {"prompt": text, "add_special_tokens": False, **named})
        # llama.cpp ignores `prompt` and returns no tokens.
        tokens = vllm or await _tokens(http, {"content": text, "add_special": False})
        if not tokens:
            raise _no_tokenizer(http)
        return tokens

    return tokenize


async def _tokens(http: httpx.AsyncClient, body: dict[str, object]) -> list[int]:
    try:
        try:
            response = await http.post("/tokenize", json=body)
        except httpx.ConnectTimeout:  # httpx-aiohttp raises this for a connection closed by the server
            response = await http.post("/tokenize", json=body)
    except httpx.TransportError as error:
        raise ConnectionFailedError(f"the connection to {http.base_url} broke: {error}") from error
    if not response.is_success:
        return []
    try:
        answer: Any = response.json()
        return [int(token) for token in answer.get("tokens") or ()]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return []


def _no_tokenizer(http: httpx.AsyncClient) -> LlmError:
    return InvalidRequestError(
        f"the server at {http.base_url} has no usable /tokenize; "
        "give its tokenizer.json with --tokenizer, or measure with --text-prompts",
        "tokenizer",
    )
