from __future__ import annotations

import asyncio
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shortfin_apps.llm.contract.errors import InvocationError
from shortfin_apps.llm.serving.http.auth import KeyRing
from tests.serving.api.harness import MAX_SEQ_LEN, MODEL, TOKENIZER, Harness
from tests.serving.api.scripted_engine import failing, forever
from tests.serving.text.tiny_tokenizers import BOS


async def test_metrics_have_prometheus_format(harness: Harness) -> None:
    await harness.post("/generate", {"text": "a"})
    response = await harness.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (s.name, s.labels.get("finished_reason") or s.labels.get("entry")): s.value
        for family in text_string_to_metric_families(response.text)
        for s in family.samples
    }
    assert samples["vllm:num_requests_running", None] == 2
    assert samples["vllm:request_success_total", "stop"] == 1
    assert samples["shortfin_llm:invocations_total", "decode_bs4"] == 6
    assert samples["vllm:time_to_first_token_seconds_count", None] == 1


async def test_server_info_and_version(harness: Harness) -> None:
    info = (await harness.client.get("/server_info")).json()
    assert info["served_model_name"] == MODEL
    assert info["server"] == {"port": 8000}
    assert info["model"] == {"max_seq_len": MAX_SEQ_LEN}
    assert (await harness.client.get("/version")).json()["version"] == info["version"]


async def test_tokenize_and_detokenize(harness: Harness) -> None:
    ids = TOKENIZER.encode("the €")
    answer = (await harness.post("/tokenize", {"prompt": "the €", "return_token_strs": True})).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), MAX_SEQ_LEN)
    assert answer["token_strs"][0] == "the"
    assert (await harness.post("/detokenize", {"tokens": ids})).json() == {"prompt": "the €"}


async def test_tokenize_a_conversation(harness: Harness) -> None:
    answer = (await harness.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]})).json()
    text = TOKENIZER.decode(answer["tokens"], skip_special_tokens=False)
    assert text == f"{BOS}[user]a\n[assistant]"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/detokenize", {"tokens": [99999]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "a"}),
    ],
)
async def test_bad_requests(harness: Harness, path: str, body: dict[str, object]) -> None:
    response = await harness.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_the_openapi_document_lists_the_routes(harness: Harness) -> None:
    paths = (await harness.client.get("/openapi.json")).json()["paths"]
    assert {"/generate", "/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics"} <= paths.keys()


async def test_live_answers_from_the_first_moment_on() -> None:
    harness = Harness(loaded=False, keys=KeyRing(["k"]))
    response = await harness.client.get("/live")
    assert (response.status_code, response.json()) == (200, {"status": "live"})


async def test_health_generate_generates_one_token(harness: Harness) -> None:
    response = await harness.client.get("/health_generate")
    assert (response.status_code, response.json()) == (200, {"status": "healthy"})
    (call,) = harness.engine.calls
    assert (len(call.prompt_token_ids), call.params.max_tokens) == (1, 1)


async def test_health_generate_is_503_when_no_token_comes_in_time() -> None:
    harness = Harness(forever(TOKENIZER, "the "))
    harness.engine.gate.clear()
    harness.service.probe_timeout_s = 0.0
    assert (await harness.client.get("/health_generate")).status_code == 503
    assert not harness.engine.live, "the probe is aborted"


async def test_health_generate_is_503_when_the_device_fails_and_while_the_model_loads() -> None:
    for harness in (Harness(failing(InvocationError("x"))), Harness(loaded=False)):
        response = await harness.client.get("/health_generate")
        assert (response.status_code, response.json()) == (503, {"status": "not healthy"})


async def test_a_full_queue_is_no_fault_of_the_engine() -> None:
    harness = Harness()
    harness.engine.capacity = 0
    assert (await harness.client.get("/health_generate")).status_code == 200
    harness.engine.healthy = False
    assert (await harness.client.get("/health_generate")).status_code == 503


async def test_a_probe_counts_for_the_tenant_whose_key_it_has() -> None:
    harness = Harness(keys=KeyRing(["k"]))
    assert (await harness.client.get("/health_generate")).status_code == 401
    await harness.client.get("/health_generate", headers={"Authorization": "Bearer k"})
    assert harness.engine.calls[0].terms.tenant


async def test_load_has_the_fields_of_vllm_and_sglang(harness: Harness) -> None:
    load = (await harness.client.get("/load")).json()
    assert load == {
        "server_load": 3,
        "dp_rank": 0,
        "num_reqs": 3,
        "num_running_reqs": 2,
        "num_waiting_reqs": 1,
        "num_tokens": 4 * 16,
        "num_queue_tokens": 0,
    }
    assert (await harness.client.get("/get_load")).json() == [load]


async def test_get_model_info_has_the_fields_of_sglang(harness: Harness) -> None:
    info = (await harness.client.get("/get_model_info")).json()
    assert (info["model_path"], info["tokenizer_path"], info["is_generation"]) == (MODEL, MODEL, True)


@pytest.mark.parametrize("path", ["/live", "/load", "/get_load", "/get_model_info", "/health_generate"])
async def test_probes_are_logged_at_debug(
    harness: Harness, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "shortfin_apps.llm.serving.http.access_log")
    await harness.client.get(path)
    assert [record.levelno for record in caplog.records if record.message == "request"] == [logging.DEBUG]


async def test_probes_in_a_row_do_not_wait_for_each_other(harness: Harness) -> None:
    answers = await asyncio.gather(*(harness.client.get("/health_generate") for _ in range(5)))
    assert [answer.status_code for answer in answers] == [200] * 5
