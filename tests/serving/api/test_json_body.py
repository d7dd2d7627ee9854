from __future__ import annotations

import json
from typing import Any

import pytest

from shortfin_apps.llm.serving.api import json_body
from shortfin_apps.llm.serving.api.json_body import HEADER
from shortfin_apps.llm.serving.http.auth import KeyRing
from tests.serving.api.harness import CHAT, COMPLETIONS, MESSAGES, MESSAGES_ROUTE, MODEL, RESPONSES, Harness

JSON = {"content-type": "application/json"}
MALFORMED = {
    "not json": b"{",
    "empty": b"",
    "nothing but a string": b'"x"',
    "not a number": b'{"text": "a", "sampling_params": {"temperature": NaN}}',
    "infinity": b'{"text": "a", "sampling_params": {"temperature": Infinity}}',
    "huge number": b'{"text": "a", "sampling_params": {"temperature": 1e999}}',
    "invalid utf-8": b'{"text": "\xff"}',
    "bottomless": b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "trailing comma": b'{"text": "a",}',
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("path", ["/generate", COMPLETIONS, CHAT, RESPONSES, MESSAGES_ROUTE, "/tokenize"])
async def test_malformed_bodies_are_400(harness: Harness, path: str, body: bytes) -> None:
    response = await harness.client.post(path, content=body, headers=JSON)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert isinstance(error, str if path == "/generate" else dict)


async def test_lone_surrogates_are_replaced_and_logged_once(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    json_body._log_surrogates.cache_clear()
    for lone in (rb"\ud83d", rb"\ude00", "\ud83d".encode("utf-8", "surrogatepass")):
        body = b'{"prompt": "a' + lone + b'b", "echo": true}'
        response = await harness.client.post(COMPLETIONS, content=body, headers=JSON)
        assert response.json()["choices"][0]["text"].startswith("a\ufffdb"), response.text
    assert sum("lone surrogates" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES_ROUTE])
async def test_a_history_with_lone_surrogates_is_answered(harness: Harness, path: str) -> None:
    history = [{"role": "user", "content": "a\ud83d"}, {"role": "assistant", "content": "\ude00"}, *MESSAGES]
    fields = {"input" if path == RESPONSES else "messages": history, "stream": True}
    if path == MESSAGES_ROUTE:
        fields["max_tokens"] = 9
    body = json.dumps(fields).encode()
    response = await harness.client.post(path, content=body, headers=JSON)
    assert response.status_code == 200, response.text


MANY = {
    "arrays": b'{"x": [' + b",".join([b"[]"] * 30_000) + b"]}",
    "objects": b'{"x": [' + b",".join([b"{}"] * 30_000) + b"]}",
    "names": b"{" + b",".join(b'"%d": 0' % i for i in range(120_000)) + b"}",
}


@pytest.mark.parametrize("body", MANY.values(), ids=MANY.keys())
async def test_a_body_is_bounded_before_it_is_parsed(
    harness: Harness, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[object] = []
    monkeypatch.setattr("shortfin_apps.llm.serving.api.json_body.orjson.loads", parsed.append)
    response = await harness.client.post(CHAT, content=body, headers=JSON)
    assert response.status_code == 400
    assert "it has more than" in response.text
    assert not parsed


async def test_the_content_type_may_have_a_charset(harness: Harness) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    response = await harness.client.post("/generate", content=b'{"text": "a"}', headers=headers)
    assert response.status_code == 200


def operations_with_a_body() -> list[tuple[str, str]]:
    """Method and path of each operation with a body in the OpenAPI document."""
    paths = Harness(loaded=False).app.openapi()["paths"]
    return [(m, path) for path, ways in paths.items() for m, way in ways.items() if "requestBody" in way]


VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": MESSAGES},
    RESPONSES: {"input": "a"},
    MESSAGES_ROUTE: {"messages": MESSAGES, "max_tokens": 9},
    f"{MESSAGES_ROUTE}/count_tokens": {"messages": MESSAGES},
    "/generate": {"text": "a"},
    "/abort": {"rid": "r"},
    "/abort_request": {"rid": "r"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [4]},
    "/log_level": {"level": "warning"},
}


@pytest.mark.parametrize("strict", [False, True])
async def test_every_route_with_a_body_checks_its_fields(strict: bool) -> None:
    harness = Harness(strict_fields=strict, keys=KeyRing([], ["root"]))
    operations = operations_with_a_body()
    assert {path for _, path in operations} >= VALID.keys()
    for method, path in operations:
        required, headers = VALID[path], {"Authorization": "Bearer root"}
        response = await harness.client.request(method, path, json=required | {"mine": 1}, headers=headers)
        assert response.status_code == (400 if strict else 200), (path, response.text)
        if strict:
            assert "`mine` is an unknown field" in response.text
        else:
            assert response.headers[HEADER] == "mine"
        plain = await harness.client.request(method, path, json=required, headers=headers)
        assert HEADER not in plain.headers


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [4]})])
async def test_another_models_name_is_404(harness: Harness, path: str, body: dict[str, object]) -> None:
    assert (await harness.post(path, body | {"model": MODEL})).status_code == 200
    assert (await harness.post(path, body | {"model": "other"})).status_code == 404


async def test_a_model_has_the_name_of_its_source_too(harness: Harness) -> None:
    harness.service.source = "random:tiny"
    answer = await harness.post(COMPLETIONS, {"prompt": "a", "model": "random:tiny"})
    assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
    assert (await harness.client.get("/v1/models/random:tiny")).json()["id"] == MODEL
