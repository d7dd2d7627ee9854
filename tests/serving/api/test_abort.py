from __future__ import annotations

import asyncio

import httpx
import pytest

from shortfin_apps.llm.serving.http.auth import KeyRing
from tests.serving.api.harness import TOKENIZER, Harness
from tests.serving.api.scripted_engine import forever


def blocked_harness(keys: KeyRing | None = None) -> Harness:
    """A server whose engine waits at its gate."""
    harness = Harness(forever(TOKENIZER, "the "), keys=keys)
    harness.engine.gate.clear()
    return harness


async def send(harness: Harness, path: str, body: object, **headers: str) -> asyncio.Task[httpx.Response]:
    task = asyncio.create_task(harness.client.post(path, json=body, headers=headers))
    await harness.engine.waiting.wait()
    return task


@pytest.mark.parametrize("path", ["/abort", "/abort_request"])
async def test_an_aborted_request_returns_its_tokens_so_far(path: str) -> None:
    harness = blocked_harness()
    answer = await send(harness, "/generate", {"text": "a", "rid": "mine"})
    assert (await harness.post(path, {"rid": "mine"})).json() == {"aborted": 1}
    harness.engine.gate.set()
    [[response]] = [item["responses"] for item in (await answer).json()["responses"]]
    assert response["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "the request was aborted",
    }
    assert not harness.engine.live


async def test_all_choices_of_a_request_are_aborted() -> None:
    harness = blocked_harness()
    body = {"prompt": ["a", "b"], "n": 2}
    answer = await send(harness, "/v1/completions", body, **{"X-Request-Id": "four"})
    assert (await harness.post("/abort", {"rid": "cmpl-four"})).json() == {"aborted": 4}
    harness.engine.gate.set()
    assert [c["finish_reason"] for c in (await answer).json()["choices"]] == ["abort"] * 4


async def test_a_stream_is_aborted() -> None:
    harness = blocked_harness()
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    answer = await send(harness, "/v1/chat/completions", body, **{"X-Request-Id": "s"})
    await harness.post("/abort", {"rid": ["nobody", "chatcmpl-s"]})
    harness.engine.gate.set()
    text = (await answer).text
    assert '"finish_reason":"abort"' in text
    assert text.endswith("data: [DONE]\n\n")


async def test_an_aborted_beam_search_has_no_partial_answer() -> None:
    harness = blocked_harness()
    body = {"text": "a", "rid": "b", "sampling_params": {"num_beams": 2}}
    answer = await send(harness, "/generate", body)
    assert (await harness.post("/abort", {"rid": "b"})).json() == {"aborted": 1}
    harness.engine.gate.set()
    assert (await answer).status_code == 499


async def test_aborting_an_unknown_or_finished_request_is_not_an_error() -> None:
    harness = Harness()
    assert (await harness.post("/abort", {"rid": ""})).json() == {"aborted": 0}
    await harness.post("/generate", {"text": "a", "rid": "done"})
    assert (await harness.post("/abort", {"rid": "done"})).json() == {"aborted": 0}


@pytest.mark.parametrize("body", [{}, {"rid": 7}, {"rid": None}])
async def test_the_id_is_required(body: object) -> None:
    response = await Harness().post("/abort", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "rid"


async def test_a_key_aborts_its_own_requests_and_an_admin_key_any() -> None:
    harness = blocked_harness(KeyRing(["first", "second"], ["root"]))
    bearer = {name: {"Authorization": f"Bearer {name}"} for name in ("first", "second", "root")}
    answer = await send(harness, "/generate", {"text": "a", "rid": "x"}, **bearer["first"])
    counts = [
        (await harness.client.post("/abort", json={"rid": "x"}, headers=bearer[name])).json()["aborted"]
        for name in ("second", "first", "root")
    ]
    assert counts == [0, 1, 1]
    harness.engine.gate.set()
    await answer


async def test_a_gateways_tenant_aborts_its_own_requests() -> None:
    harness = blocked_harness(KeyRing(gateway_keys=["gate"]))
    alice, bob = ({"Authorization": "Bearer gate", "X-Tenant": name} for name in ("alice", "bob"))
    answer = await send(harness, "/generate", {"text": "a", "rid": "x"}, **alice)
    counts = [
        (await harness.client.post("/abort", json={"rid": "x"}, headers=headers)).json()["aborted"]
        for headers in (bob, alice)
    ]
    assert counts == [0, 1]
    harness.engine.gate.set()
    await answer
