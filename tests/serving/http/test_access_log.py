from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.messages import Delta, GenerateCall
from shortfin_apps.llm.contract.errors import DeadlineExceededError, InvocationError
from shortfin_apps.llm.serving.api.limits import Limits
from shortfin_apps.llm.serving.http.auth import KeyRing
from shortfin_apps.llm.serving.server.logs import formatter
from tests.serving.api.harness import TOKENIZER, Harness
from tests.serving.api.loopback import TIMEOUT_S, ready_server
from tests.serving.api.scripted_engine import Script, aborting, failing, forever

LOGGER = "shortfin_apps.llm.serving.http.access_log"
CHAT = {"messages": [{"role": "user", "content": "a"}]}
TIMES = ("queue_s", "ttft_s", "total_s")


def broken(call: GenerateCall) -> Iterator[Delta]:
    raise ZeroDivisionError


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[dict[str, Any]]:
    """The fields of each access log line."""
    records = [r for r in caplog.records if r.name == LOGGER and r.levelno >= level]
    return [vars(record) for record in records]


@pytest.fixture(autouse=True)
def log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)


async def test_a_request_logs_one_line_with_its_measurements(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = "the end"
    answer = await harness.client.post(
        "/v1/completions", json={"prompt": prompt}, headers={"X-Request-Id": "mine-1"}
    )
    usage = answer.json()["usage"]
    [line] = lines(caplog)
    assert line["request_id"] == answer.headers["x-request-id"] == "mine-1"
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["finish_reason"], line["error"], line["sequences"]) == ("stop", None, 1)
    assert line["tokens_in"] == usage["prompt_tokens"]
    assert line["tokens_out"] == usage["completion_tokens"]
    assert line["tokens_cached"] == usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert 0 <= line["ttft_s"] <= line["total_s"]
    assert line["queue_s"] == 0.0
    assert line["tenant"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "sequences", "prompts"),
    [
        ("/generate", {"text": "a", "sampling_params": {"n": 3}}, 3, 1),
        ("/generate", {"input_ids": [[5], [6]], "sampling_params": [{"n": 1}, {"n": 2}]}, 3, 2),
        ("/v1/completions", {"prompt": [[5], [6]], "n": 2}, 4, 2),
        ("/v1/completions", {"prompt": [5]}, 1, 1),
    ],
)
async def test_prompts_are_counted_once_and_every_answer_is_counted(
    path: str, body: dict[str, Any], sequences: int, prompts: int, stream: bool,
    harness: Harness, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    await harness.post(path, {**body, "stream": stream})
    [line] = lines(caplog)
    num_tokens = len(TOKENIZER.encode("the end")) + 1
    assert (line["sequences"], line["tokens_in"]) == (sequences, prompts)
    assert (line["tokens_cached"], line["tokens_out"]) == (3 * prompts, num_tokens * sequences)


@pytest.mark.parametrize(
    ("body", "rid"),
    [
        ({"text": "a", "rid": "r1"}, "r1"),
        ({"text": ["a", "b"], "rid": ["r1", "r2"]}, "r1"),
        ({"text": ["a", "b"]}, None),
        ({"text": "a"}, None),
    ],
)
async def test_the_clients_request_id_is_logged(
    body: dict[str, Any], rid: str | None, harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await harness.post("/generate", body)).status_code == 200
    [line] = lines(caplog)
    assert line["rid"] == rid


async def test_a_beam_search_counts_its_steps_as_tokens(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"num_beams": 2, "max_new_tokens": 2}}
    assert (await harness.post("/generate", body)).status_code == 200
    [line] = lines(caplog)
    assert (line["sequences"], line["tokens_in"], line["finish_reason"]) == (1, 2, "length")
    assert line["tokens_out"] == 2


REFUSED: list[tuple[str, str, Any, int, str | None]] = [
    ("POST", "/generate", {"text": "a", "sampling_params": {"n": 0}}, 400, "INVALID_REQUEST_ARGS"),
    ("POST", "/v1/completions", {"prompt": 1.5}, 400, "INVALID_REQUEST_ARGS"),
    ("POST", "/v1/chat/completions", {**CHAT, "model": "other"}, 404, "model_not_found"),
    ("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 10**6}, 400, "context_length_exceeded"),
    ("POST", "/generate", {"text": "a" * 5000}, 413, None),
    ("POST", "/abort_all", None, 403, "FORBIDDEN"),
    ("GET", "/generate", None, 405, None),
    ("GET", "/nowhere", None, 404, None),
    ("OPTIONS", "/generate", None, 405, None),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "error"), REFUSED)
async def test_a_refused_request_logs_one_line(
    method: str, path: str, body: Any, status: int, error: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(limits=Limits(body_bytes=4096))
    response = await harness.client.request(method, path, json=body)
    assert response.status_code == status
    [line] = lines(caplog)
    assert (line["route"], line["status"], line["error"]) == (path, status, error)
    assert line["request_id"] == response.headers["x-request-id"]
    assert (line["tokens_out"], line["finish_reason"]) == (None, None)


@pytest.mark.parametrize("key", ["", "k"])
async def test_a_request_without_a_valid_key_logs_one_line(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(keys=KeyRing(["known"]))
    for path in ("/generate", "/metrics"):
        response = await harness.client.post(path, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 401
    assert [(line["route"], line["error"]) for line in lines(caplog)] == [
        ("/generate", "invalid_api_key"),
        ("/metrics", "invalid_api_key"),
    ]


async def test_a_request_that_is_not_admitted_logs_one_line(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.engine.capacity = 1
    await harness.post("/v1/completions", {"prompt": [5], "n": 2})
    harness.engine.draining = True
    await harness.post("/v1/completions", {"prompt": [5], "stream": True})
    full, draining = lines(caplog)
    assert (full["status"], full["error"], full["tokens_in"]) == (429, "QUEUE_FULL", 1)
    assert (draining["status"], draining["error"]) == (503, "UNAVAILABLE")
    assert full["ttft_s"] is draining["ttft_s"] is None


FAILED: list[tuple[Script, bool, int, str | None, str | None]] = [
    (failing(InvocationError("x")), False, 500, "error", "INVOCATION_FAILED"),
    (failing(InvocationError("x")), True, 500, "error", "INVOCATION_FAILED"),
    (failing(InvocationError("x"), after=(5,)), True, 200, "error", "INVOCATION_FAILED"),
    (aborting(DeadlineExceededError("late")), False, 408, "abort", "DEADLINE_EXCEEDED"),
    (aborting(DeadlineExceededError("late"), after=(5,)), False, 200, "abort", None),
    (broken, False, 500, "abort", "INTERNAL_ERROR"),
    (broken, True, 500, "abort", "INTERNAL_ERROR"),
]


@pytest.mark.parametrize(("script", "stream", "status", "reason", "error"), FAILED)
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_a_failed_request_logs_one_line(
    script: Script, stream: bool, status: int, reason: str, error: str | None, path: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    prompt = {"text": "a"} if path == "/generate" else {"prompt": "a"}
    response = await Harness(script).post(path, {**prompt, "stream": stream})
    [line] = lines(caplog)
    assert (line["status"], line["finish_reason"], line["error"]) == (status, reason, error)
    assert response.status_code == status
    assert response.headers["x-request-id"] == line["request_id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_request_and_its_abort_log_a_line_each(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(forever(TOKENIZER, "the "))
    harness.engine.gate.clear()
    body = {"text": "a", "rid": "r1", "stream": stream}
    answer = asyncio.create_task(harness.post("/generate", body))
    async with asyncio.timeout(TIMEOUT_S):
        await harness.engine.waiting.wait()
        await harness.post("/abort", {"rid": "r1"})
        harness.engine.gate.set()
        await answer
    abort, aborted = lines(caplog)
    assert (abort["route"], abort["status"], abort["finish_reason"]) == ("/abort", 200, None)
    assert (aborted["route"], aborted["status"], aborted["finish_reason"]) == ("/generate", 200, "abort")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_logs_one_line(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with ready_server(forever(TOKENIZER, "the ")) as server:
        server.engine.gate.clear()
        writer = await server.send_raw("/generate", json.dumps({"text": "a", "stream": stream}).encode())
        async with asyncio.timeout(TIMEOUT_S):
            await server.engine.waiting.wait()
            writer.close()
            await server.engine.freed.wait()
    [line] = lines(caplog)
    assert (line["status"], line["finish_reason"]) == (499, "abort")


async def test_probes_are_logged_at_debug_only(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    for path in ("/health", "/ready", "/metrics"):
        await harness.client.get(path)
    harness.engine.healthy = False
    await harness.client.get("/health")
    assert lines(caplog) == []
    logged = [(line["route"], line["status"]) for line in lines(caplog, logging.DEBUG)]
    assert logged == [("/health", 200), ("/ready", 200), ("/metrics", 200), ("/health", 503)]


async def test_routes_are_logged_without_their_parameters(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    await harness.client.get("/v1/models/my/own?prompt=words")
    [line] = lines(caplog)
    assert line["route"] == "/v1/models/{model_id:path}"
    assert "words" not in str(line)


async def test_tenants_are_logged_as_hashes(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    for user in ("alice@example.org", "bob", "alice@example.org"):
        await harness.post("/v1/completions", {"prompt": "a", "user": user})
    await harness.client.post("/generate", json={"text": "a"}, headers={"X-Tenant": "bob"})
    alice, bob, again, header = [line["tenant"] for line in lines(caplog)]
    assert alice == again != bob == header
    assert "alice" not in str(lines(caplog))


async def test_the_logged_tenant_of_a_key_is_the_schedulers(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(keys=KeyRing(["first", "second"]))
    for key in ("first", "second", "first"):
        headers = {"Authorization": f"Bearer {key}"}
        await harness.client.post("/generate", json={"text": "a", "user": "x"}, headers=headers)
        await harness.client.post("/generate", json={}, headers=headers)
    tenants = [line["tenant"] for line in lines(caplog)]
    assert tenants[0] == tenants[1] == tenants[4] != tenants[2] == tenants[3]
    assert tenants[0] == harness.engine.calls[0].terms.tenant


async def test_a_gateways_tenants_are_logged_as_hashes(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(keys=KeyRing(gateway_keys=["gate"]))
    for name in ("alice", "bob", "alice"):
        headers = {"Authorization": "Bearer gate", "X-Tenant": name}
        await harness.client.post("/generate", json={"text": "a"}, headers=headers)
    alice, bob, again = [line["tenant"] for line in lines(caplog)]
    assert alice == again != bob
    assert "alice" not in str(lines(caplog))


HOSTILE = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rid=HOSTILE, tenant=HOSTILE, path=HOSTILE)
async def test_ids_cannot_forge_log_lines(
    rid: str, tenant: str, path: str, harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    headers = {b"X-Request-Id": rid.encode(), b"X-Tenant": tenant.encode()}
    await harness.client.post("/generate", json={"text": "a", "rid": rid, "user": tenant}, headers=headers)
    await harness.client.post(f"/x{quote(path)}")
    records = [record for record in caplog.records if record.name == LOGGER]
    assert len(records) == 2
    for record in records:
        text = formatter("text").format(record)
        assert len(text.splitlines()) == 1
        assert text.isprintable()
        assert text.isascii()
        line = formatter("json").format(record)
        assert len(line.splitlines()) == 1
        assert json.loads(line)["route"] == vars(record)["route"]
