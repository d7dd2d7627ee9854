from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shortfin_apps.llm.client import LlmClient
from shortfin_apps.llm.client.errors import ServerError
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.receipts.receipt import Receipt, ReceiptError, to_text
from shortfin_apps.llm.tools.replay.compare import Outcome
from shortfin_apps.llm.tools.replay.over_http import replay_on
from tests.scripted_server import ScriptedServer, says
from tests.serving.receipts.examples import TOKENS, receipt_json

WRITTEN = receipt_json()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer().running() as server:
        yield server


def answer(receipt: Any) -> dict[str, Any]:
    return {"responses": [{"responses": [{"text": "", "meta_info": {"receipt": receipt}}]}]}


async def outcome_of(server: ScriptedServer, *written: Any) -> Outcome:
    async with LlmClient(server.url) as client:
        return await replay_on(client, [Receipt.parse(each) for each in written], 2)


async def test_asks_for_the_same_and_compares(server: ScriptedServer) -> None:
    server.on("/generate", says(answer(WRITTEN)))
    outcome = await outcome_of(server, WRITTEN, WRITTEN, WRITTEN)
    assert (outcome.num_same, outcome.differences) == (3, {})
    [body, *_] = server.bodies("/generate")
    assert body == {
        "input_ids": [1, 2, 3],
        "sampling_params": {
            "max_tokens": 3,
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "typical_p": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
        },
        "receipt": True,
    }


async def test_other_tokens_are_told(server: ScriptedServer) -> None:
    server.on("/generate", says(answer(receipt_json((TOKENS[0], (9, 1.0), TOKENS[2])))))
    outcome = await outcome_of(server, WRITTEN)
    assert outcome.differences == {1: "differs at token 2 of 3: 6 is now 9"}


async def test_another_reading_of_the_parameters_is_told(server: ScriptedServer) -> None:
    server.on("/generate", says(answer(receipt_json(top_k=5, seed=1))))
    outcome = await outcome_of(server, WRITTEN)
    assert outcome.differences == {1: "the server read `sampling` otherwise: seed, top_k"}


async def test_another_model_is_an_error(server: ScriptedServer) -> None:
    server.on("/generate", says(answer(WRITTEN | {"artifact": to_text(b"x" * 16)})))
    with pytest.raises(ReceiptError, match="of another model than the server's: its artifact is"):
        await outcome_of(server, WRITTEN)


@pytest.mark.parametrize("body", [{}, [], {"responses": []}, answer(None)["responses"]])
async def test_another_server_is_an_error(server: ScriptedServer, body: Any) -> None:
    server.on("/generate", says(body))
    with pytest.raises(ServerError, match="has no receipt"):
        await outcome_of(server, WRITTEN)


async def test_a_refusal_is_passed_on(server: ScriptedServer) -> None:
    server.on("/generate", says({"error": "too long", "code": "x"}, 400))
    with pytest.raises(InvalidRequestError, match="too long"):
        await outcome_of(server, WRITTEN, WRITTEN, WRITTEN)
