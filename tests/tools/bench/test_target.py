from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import tokenizers
from starlette.responses import Response

from shortfin_apps.llm.client import ConnectionFailedError
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.tools.bench.target import (
    TargetOptions,
    file_tokenizer,
    http_client,
    open_target,
    parse_urls,
    server_tokenizer,
    text_prompt,
    token_prompts,
)
from tests.scripted_server import TIMEOUT_S, Answer, ScriptedServer, says


@pytest_asyncio.fixture
async def http(server: ScriptedServer) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(server.url, timeout_s=TIMEOUT_S) as client:
        yield client


def letters(field: str) -> Answer:
    """A /tokenize that reads one field and returns one token per letter."""
    return lambda request, body: says({"tokens": [ord(c) for c in body.get(field, "")]})(request, body)


def test_addresses_may_have_labels() -> None:
    assert parse_urls(["http://a:1/", "vllm=https://b/v1?x=http://c"]) == [
        ("a:1", "http://a:1/"),
        ("vllm", "https://b/v1?x=http://c"),
    ]


def test_labels_must_differ() -> None:
    with pytest.raises(InvalidRequestError, match="same label"):
        parse_urls(["x=http://a", "x=http://b"])


@pytest.mark.parametrize("field", ["prompt", "content"])
async def test_tokenize_of_vllm_and_of_llama_cpp(
    http: httpx.AsyncClient, server: ScriptedServer, field: str
) -> None:
    server.on("/tokenize", letters(field))
    assert await server_tokenizer(http, "tiny")("ab") == [97, 98]


@pytest.mark.parametrize(
    "content", [b"not json", b"3", b'{"tokens": 3}', b'{"tokens": ["a"]}', b"[" * 100_000]
)
async def test_a_tokenize_that_answers_something_else_is_none(
    http: httpx.AsyncClient, server: ScriptedServer, content: bytes
) -> None:
    server.on("/tokenize", lambda request, body: Response(content, media_type="application/json"))
    with pytest.raises(InvalidRequestError, match="no usable /tokenize"):
        await server_tokenizer(http, "tiny")("ab")


async def test_a_hostile_expression_of_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    """It is a panic, which is no Exception."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("^(a+)+$"), "isolated")
    tokenizer.save(str(tmp_path / "t"))
    with pytest.raises(InvalidRequestError, match=r"not a usable tokenizer.json \(.*retry-limit"):
        await file_tokenizer(tmp_path / "t")("a" * 40 + "!")


async def test_a_kept_connection_that_the_server_closes_is_replaced() -> None:
    """Each connection answers one request and closes on the next, although it is keep-alive."""
    body = b'{"tokens": [1]}'
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"

    ended: asyncio.Queue[None] = asyncio.Queue()

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(head.encode() + body)
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"}")
        writer.close()
        await writer.wait_closed()
        ended.put_nowait(None)

    server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, http_client(f"http://127.0.0.1:{port}", timeout_s=TIMEOUT_S) as client:
        tokenize = server_tokenizer(client, None)
        assert [await tokenize("a") for _ in range(2)] == [[1], [1]]
        await client.aclose()
        for _ in range(2):
            await ended.get()


async def test_without_tokenize_the_error_says_what_to_do(http: httpx.AsyncClient) -> None:
    with pytest.raises(InvalidRequestError, match="--tokenizer, or measure with --text-prompts"):
        await server_tokenizer(http, None)("ab")


async def test_prompts_are_exact_and_share_only_the_prefix(
    http: httpx.AsyncClient, server: ScriptedServer
) -> None:
    server.on("/tokenize", letters("prompt"))
    prompt = token_prompts(server_tokenizer(http, None))
    one, other = [await prompt(f"seed/{n}", 32, "prefix", 64) for n in range(2)]
    assert len(one) == len(other) == 96
    assert one[:64] == other[:64]
    assert one[64:80] != other[64:80]
    assert (await prompt("seed/0", 32, "another", 64))[:16] != one[:16]
    assert await prompt("seed/0", 32, "", 0) == one[64:]


async def test_text_prompts_share_their_prefix_too() -> None:
    one, other = [await text_prompt(f"seed/{n}", 32, "prefix", 64) for n in range(2)]
    assert one != other
    assert one.split()[:49] == other.split()[:49]


async def test_a_tokenizer_from_a_file(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"a": 3, "b": 4, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert await file_tokenizer(tmp_path / "tokenizer.json")("b a") == [4, 3]
    with pytest.raises(InvalidRequestError, match="not a usable"):
        file_tokenizer(tmp_path / "nothing.json")


async def test_the_servers_first_model_is_measured(server: ScriptedServer) -> None:
    server.on("/v1/models", says({"data": [{"id": "tiny"}]}))
    async with open_target("x", server.url + "/v1", TargetOptions(api_key="k")) as target:
        assert (target.model, target.url) == ("tiny", server.url)
        await target.http.get("/health")
    assert {seen.headers["authorization"] for seen in server.seen} == {"Bearer k"}


async def test_a_server_that_lists_no_models_is_measured_without_a_name(server: ScriptedServer) -> None:
    async with open_target("x", server.url, TargetOptions(text_prompts=True)) as target:
        assert target.model is None


async def test_a_missing_server_is_reported_before_measuring() -> None:
    with pytest.raises(ConnectionFailedError, match="no server answers"):
        async with open_target("x", "http://127.0.0.1:1", TargetOptions()):
            pass
