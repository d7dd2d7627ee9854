from __future__ import annotations

import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shortfin_apps.llm.api.app import create_app
from shortfin_apps.llm.api.auth import KeyRing
from tests.api.harness import BASE_URL, MAX_SEQ_LEN, MODEL, TOKENIZER, Harness
from tests.components.text.tiny_tokenizers import BOS


async def test_health_follows_the_engine(harness: Harness) -> None:
    assert (await harness.client.get("/health")).status_code == 200
    harness.engine.healthy = False
    assert (await harness.client.get("/health")).status_code == 503


async def test_ready_until_draining(harness: Harness) -> None:
    assert (await harness.client.get("/ready")).status_code == 200
    await harness.engine.drain(0)
    assert (await harness.client.get("/ready")).status_code == 503


async def test_while_loading() -> None:
    harness = Harness(loaded=False)
    assert (await harness.client.get("/ready")).status_code == 503
    assert (await harness.client.get("/health")).status_code == 200
    assert (await harness.client.get("/metrics")).status_code == 200
    assert (await harness.client.get("/server_info")).json()["model"] is None
    response = await harness.client.get("/v1/models")
    assert (response.status_code, response.json()["error"]["type"]) == (503, "service_unavailable_error")


async def test_metrics_speak_prometheus(harness: Harness) -> None:
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


async def test_tokenize_and_back(harness: Harness) -> None:
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


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [4]})])
async def test_another_models_tokens_are_not_ours(
    harness: Harness, path: str, body: dict[str, object]
) -> None:
    assert (await harness.post(path, body | {"model": MODEL})).status_code == 200
    assert (await harness.post(path, body | {"model": "other"})).status_code == 404


async def test_the_openapi_document_is_there(harness: Harness) -> None:
    paths = (await harness.client.get("/openapi.json")).json()["paths"]
    assert {"/generate", "/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics"} <= paths.keys()


@pytest.mark.parametrize("root_path", ["", "/llm"])
@pytest.mark.parametrize("page", ["/docs", "/redoc"])
async def test_the_pages_of_documents_need_no_other_server(root_path: str, page: str) -> None:
    """Behind a proxy that strips a prefix, too."""
    app = create_app(Harness(loaded=False).service, root_path=root_path)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url=BASE_URL) as client:
        text = (await client.get(page)).text
        assert '"validatorUrl": null' in text or page == "/redoc"  # else it asks a service about our address
        links = re.findall(r"""(?:src|href|url|spec-url)(?:=|: )["']([^"']+)""", text)
        assert len(links) >= 3
        for link in links:
            assert link.startswith(root_path + "/"), f"{page} loads {link}"
            asset = await client.get(link.removeprefix(root_path))
            assert asset.status_code == 200, link
            assert asset.content


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_a_proxy_may_strip_its_prefix_or_leave_it(prefix: str) -> None:
    harness = Harness(keys=KeyRing(["key"]), root_path="/llm")
    assert (await harness.client.get(f"{prefix}/health")).status_code == 200
    assert (await harness.client.get(f"{prefix}/metrics")).status_code == 401
    headers = {"Authorization": "Bearer key"}
    assert (await harness.client.get(f"{prefix}/metrics", headers=headers)).status_code == 200
    document = (await harness.client.get(f"{prefix}/openapi.json", headers=headers)).json()
    assert document["servers"] == [{"url": "/llm"}]
    answer = await harness.client.post(f"{prefix}/generate", json={"text": ""}, headers=headers)
    assert isinstance(answer.json()["error"], str), "/generate has upstream's errors"


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models"])
async def test_head_is_get_without_a_body(path: str, harness: Harness) -> None:
    """Load balancers and monitors ask so; RFC 9110 (9.1) wants it of every server."""
    whole, head = await harness.client.get(path), await harness.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert "content-length" in head.headers


async def test_head_of_a_route_that_takes_posts_is_405(harness: Harness) -> None:
    assert (await harness.client.head("/generate")).status_code == 405
