from __future__ import annotations

import re

import httpx
import pytest

from shortfin_apps.llm.serving.api.app import create_app
from shortfin_apps.llm.serving.api.json_body import HEADER
from shortfin_apps.llm.serving.http.auth import KeyRing
from tests.serving.api.harness import BASE_URL, COMPLETIONS, Harness


@pytest.mark.parametrize("root_path", ["", "/llm"])
@pytest.mark.parametrize("page", ["/docs", "/redoc"])
async def test_docs_pages_load_nothing_from_other_servers(root_path: str, page: str) -> None:
    """Also behind a proxy that strips the root path."""
    app = create_app(Harness(loaded=False).service, root_path=root_path)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url=BASE_URL) as client:
        text = (await client.get(page)).text
        assert '"validatorUrl": null' in text or page == "/redoc"  # else it sends our address to a validator
        links = re.findall(r"""(?:src|href|url|spec-url)(?:=|: )["']([^"']+)""", text)
        assert len(links) >= 3
        for link in links:
            assert link.startswith(root_path + "/"), f"{page} loads {link}"
            asset = await client.get(link.removeprefix(root_path))
            assert asset.status_code == 200, link
            assert asset.content


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_a_proxy_may_strip_the_root_path_or_keep_it(prefix: str) -> None:
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
    """Load balancers and monitors send HEAD; RFC 9110 (9.1) requires support for it."""
    whole, head = await harness.client.get(path), await harness.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert "content-length" in head.headers


async def test_head_of_a_post_route_is_405(harness: Harness) -> None:
    assert (await harness.client.head("/generate")).status_code == 405


async def test_request_ids_are_used_and_returned(harness: Harness) -> None:
    response = await harness.client.post(
        COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Id": "my-own"}
    )
    assert response.headers["x-request-id"] == "my-own"
    assert response.json()["id"] == "cmpl-my-own"
    for bad in ("", "two words", "x" * 129):
        response = await harness.client.get("/v1/models", headers={"X-Request-Id": bad})
        assert len(response.headers["x-request-id"]) == 32


@pytest.mark.parametrize("origins", [(), ("https://a.example",), ("*",)])
async def test_only_allowed_origins_may_call(origins: tuple[str, ...]) -> None:
    harness = Harness(keys=KeyRing(["key"]), cors_origins=origins)
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    preflight = await harness.client.options("/v1/chat/completions", headers=headers)
    assert preflight.is_success is bool(origins)
    assert ("access-control-allow-origin" in preflight.headers) is bool(origins)
    other_origin = {**headers, "origin": "https://b.example"}
    preflight = await harness.client.options("/v1/chat/completions", headers=other_origin)
    assert ("access-control-allow-origin" in preflight.headers) is (origins == ("*",))
    refused = await harness.client.post("/generate", json={"text": "a"}, headers=headers)
    assert refused.status_code == 401, "an allowed origin still needs a key"


async def test_allowed_origins_may_read_the_header() -> None:
    harness = Harness(cors_origins=["https://app.example"])
    headers = {"Origin": "https://app.example"}
    response = await harness.client.post(COMPLETIONS, json={"prompt": "a", "mine": 1}, headers=headers)
    assert HEADER in response.headers["access-control-expose-headers"]
