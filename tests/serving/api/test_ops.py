from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.api.harness import MAX_SEQ_LEN, MODEL, TOKENIZER, Harness
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
