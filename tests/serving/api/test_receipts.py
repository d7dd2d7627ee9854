"""Receipts in the answers of every route, made by the tiny model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.serving.receipts.draft import identity_of
from shortfin_apps.llm.serving.receipts.receipt import Receipt
from shortfin_apps.llm.serving.receipts.signature import Verifier
from tests.integration.served_tiny import serving
from tests.serving.api.harness import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    MESSAGES_ROUTE,
    NATIVE,
    RESPONSES,
    Harness,
)

PROMPTS: dict[str, dict[str, Any]] = {
    NATIVE: {"text": "Hello"},
    COMPLETIONS: {"prompt": "Hello"},
    CHAT: {"messages": MESSAGES},
    RESPONSES: {"input": MESSAGES},
    MESSAGES_ROUTE: {"messages": MESSAGES},
}
WITH_CHOICES = (NATIVE, COMPLETIONS, CHAT)


@pytest.fixture
async def client(tiny_artifact: Artifact) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(tiny_artifact) as (client, _):
        yield client


def body_of(route: str, receipt: object = True, **sampling: Any) -> dict[str, Any]:
    sampling = {"max_output_tokens" if route == RESPONSES else "max_tokens": 6, **sampling}
    fields = {"sampling_params": sampling} if route == NATIVE else sampling
    return {**PROMPTS[route], **fields, "receipt": receipt}


def found_in(value: Any) -> list[dict[str, Any]]:
    """The receipts in an answer, in order."""
    if isinstance(value, dict):
        own = [value["receipt"]] if value.get("receipt") is not None else []
        return own + [each for inner in value.values() for each in found_in(inner) if each not in own]
    return [each for inner in value for each in found_in(inner)] if isinstance(value, list) else []


async def receipts(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await client.post(route, json=body)
    assert response.status_code == 200, response.text
    return found_in(payloads_of(response) if body.get("stream") else response.json())


def payloads_of(response: httpx.Response) -> list[Any]:
    """The JSON payloads of a stream, with or without `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("route", PROMPTS)
async def test_an_answer_has_one_if_it_was_asked_for(
    client: httpx.AsyncClient, tiny_artifact: Artifact, route: str
) -> None:
    # Greedy: a drawn answer may end before it has 6 tokens.
    [written] = await receipts(client, route, body_of(route, temperature=0.0))
    receipt, identity = Receipt.parse(written), identity_of(tiny_artifact)
    assert identity is not None
    assert (receipt.artifact, receipt.tokenizer) == (identity.artifact, identity.tokenizer)
    assert len(receipt.output_ids) == 6
    assert (receipt.prompt, receipt.finish.value) == (None, "length")
    for not_asked in (None, False):
        assert await receipts(client, route, body_of(route, not_asked)) == []


@pytest.mark.parametrize("route", PROMPTS)
async def test_a_stream_has_the_same_as_the_whole_answer(client: httpx.AsyncClient, route: str) -> None:
    body = body_of(route, seed=3, temperature=1.0)
    assert await receipts(client, route, body | {"stream": True}) == await receipts(client, route, body)


@pytest.mark.parametrize("route", PROMPTS)
async def test_the_prompt_is_in_it_if_its_text_was_asked_for(client: httpx.AsyncClient, route: str) -> None:
    [written] = await receipts(client, route, body_of(route, "text"))
    ends = "Hello" if route in (NATIVE, COMPLETIONS) else "assistant\n"
    assert written["prompt"].endswith(ends)


@pytest.mark.parametrize("route", WITH_CHOICES)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_has_its_own(client: httpx.AsyncClient, route: str, stream: bool) -> None:
    body = body_of(route, n=3, temperature=1.5) | {"stream": stream}
    found = sorted(await receipts(client, route, body), key=lambda each: each["sampling"]["seed"])
    first = found[0]["sampling"]["seed"]
    assert first < 2**53
    assert [each["sampling"]["seed"] for each in found] == [first, first + 1, first + 2]
    assert len({each["logits"] for each in found}) == 3


@pytest.mark.parametrize("route", PROMPTS)
async def test_a_drawn_seed_gives_the_same_answer_again(client: httpx.AsyncClient, route: str) -> None:
    [first] = await receipts(client, route, body_of(route, temperature=1.0))
    again = body_of(route, temperature=1.0, seed=first["sampling"]["seed"])
    assert await receipts(client, route, again) == [first]


async def test_greedy_answers_need_no_seed(client: httpx.AsyncClient) -> None:
    [written] = await receipts(client, NATIVE, body_of(NATIVE))
    assert written["sampling"] == {"max_tokens": 6, "temperature": 0.0}


async def test_best_of_returns_those_of_the_best(client: httpx.AsyncClient) -> None:
    body = body_of(COMPLETIONS, n=2, best_of=4, temperature=1.5, seed=1)
    found = await receipts(client, COMPLETIONS, body)
    assert len(found) == 2
    assert {each["sampling"]["seed"] for each in found} <= {1, 2, 3, 4}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_receipt_where_it_ends_the_answer(
    client: httpx.AsyncClient, stream: bool
) -> None:
    [whole] = await receipts(client, NATIVE, body_of(NATIVE, max_tokens=30))
    detokenized = await client.post("/detokenize", json={"tokens": whole["output_ids"][4:6]})
    stop = detokenized.json()["prompt"]
    [written] = await receipts(
        client, NATIVE, body_of(NATIVE, max_tokens=30, stop=[stop]) | {"stream": stream}
    )
    assert written["output_ids"] == whole["output_ids"][: len(written["output_ids"])]
    assert len(written["output_ids"]) <= 6
    assert (written["finish"], written["sampling"]["stop"]) == ("stop", [stop])


async def test_an_aborted_answer_has_one_of_its_tokens(client: httpx.AsyncClient) -> None:
    body = body_of(NATIVE, max_tokens=900, ignore_eos=True) | {"rid": "mine"}
    answer = asyncio.ensure_future(receipts(client, NATIVE, body))
    while (await client.post("/abort", json={"rid": "mine"})).json() == {"aborted": 0}:
        await asyncio.sleep(0)
    try:
        [written] = await answer
    except AssertionError as error:  # it was aborted before its first token, and has no answer
        assert "aborted" in str(error)  # noqa: PT017
    else:
        assert written["finish"] == "abort"
        Receipt.parse(written)


async def test_grammars_and_words_are_recorded_as_they_were_given(client: httpx.AsyncClient) -> None:
    [written] = await receipts(client, NATIVE, body_of(NATIVE, regex="[ab]{3}", bad_words=["aa"]))
    sampling = written["sampling"]
    assert (sampling["structured_outputs"], sampling["bad_words"]) == ({"regex": "[ab]{3}"}, ["aa"])


async def test_scoring_a_prompt_leaves_the_receipt_alone(client: httpx.AsyncClient) -> None:
    body = body_of(COMPLETIONS, temperature=0)
    [plain] = await receipts(client, COMPLETIONS, body)
    assert await receipts(client, COMPLETIONS, body | {"prompt_logprobs": 1, "logprobs": 2}) == [plain]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling_params": {"num_beams": 2}}, "a beam search has several"),
        ({"sampling_params": {"max_tokens": 0}}, "none is generated"),
        ({"receipt": "prompt"}, "receipt"),
        ({"receipt": 1}, "receipt"),
    ],
)
async def test_where_there_can_be_none_the_field_is_named(
    client: httpx.AsyncClient, change: dict[str, Any], message: str
) -> None:
    response = await client.post(NATIVE, json=body_of(NATIVE) | change)
    assert response.status_code == 400
    assert message in response.json()["error"]


async def test_clients_cannot_set_what_the_engine_reports(client: httpx.AsyncClient) -> None:
    response = await client.post(NATIVE, json=body_of(NATIVE, None, chosen_logits="yes"))
    assert response.status_code == 200


async def test_a_model_without_a_manifest_says_why() -> None:
    response = await Harness().post(NATIVE, body_of(NATIVE))
    assert response.status_code == 400
    assert "have no manifest" in response.json()["error"]


async def test_every_answer_has_one_by_setting(tiny_artifact: Artifact, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    file = tmp_path / "key.pem"
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    async with serving(tiny_artifact, receipts=True, receipt_key=file) as (client, _):
        for route in PROMPTS:
            [written] = await receipts(client, route, body_of(route, None))
            Verifier(key.public_key()).check(Receipt.parse(written))
            assert await receipts(client, route, body_of(route, False)) == []
        assert await receipts(client, NATIVE, body_of(NATIVE, None, max_tokens=0)) == []
        response = await client.post(NATIVE, json=body_of(NATIVE, None, num_beams=2))
        assert "set it to false" in response.json()["error"]
