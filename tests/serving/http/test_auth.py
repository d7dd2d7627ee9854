from __future__ import annotations

import hmac
from typing import Any

import pytest

from shortfin_apps.llm.serving.frontend.text_workers import TextWorkers, current_tenant
from shortfin_apps.llm.serving.http.auth import ANONYMOUS, OPEN_PATHS, KeyRing
from tests.serving.api.harness import BASE_URL, CHAT, MESSAGES, Harness

KEYS = KeyRing(["first", "second"], ["root"], ["gate"])
GENERATE = {"text": "a"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def routes() -> list[tuple[str, str]]:
    app = Harness(keys=KEYS).app
    paths = [(path, method) for path, item in app.openapi()["paths"].items() for method in item]
    pages = ("/docs", "/docs/oauth2-redirect", "/redoc", "/static-offline-docs/favicon.png", "/openapi.json")
    return [*paths, *((page, "get") for page in pages), ("/nowhere", "get")]


def test_every_route_is_in_the_openapi_document() -> None:
    declared = set(Harness().app.state.paths)  # newer releases of FastAPI hide them in `routes`
    assert {CHAT, "/metrics"} <= declared <= {path for path, _ in routes()}


@pytest.mark.parametrize(("path", "method"), routes())
@pytest.mark.parametrize(
    "headers", [{}, bearer("third"), bearer(""), {"authorization": "first"}, {"authorization": "Basic first"}]
)
async def test_without_a_valid_key_only_health_checks_are_served(
    path: str, method: str, headers: dict[str, str]
) -> None:
    harness = Harness(keys=KEYS)
    response = await harness.client.request(method, path, headers=headers)
    if path in OPEN_PATHS:
        assert response.status_code == 200
        return
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    is_wrong = headers == bearer("third")
    assert message.startswith("the API key is not one" if is_wrong else "an API key is needed")


@pytest.mark.parametrize("path", ["/health/", "//health", "/health/../metrics", "/healthx", "/ready%20"])
async def test_paths_similar_to_open_ones_need_a_key(path: str) -> None:
    assert (await Harness(keys=KEYS).client.get(f"{BASE_URL}{path}")).status_code == 401


@pytest.mark.parametrize("key", ["first", "second", "root"])
async def test_each_key_is_accepted(key: str) -> None:
    harness = Harness(keys=KEYS)
    response = await harness.client.post("/generate", json=GENERATE, headers=bearer(key))
    assert response.status_code == 200
    assert (await harness.client.get("/metrics", headers={"authorization": f"bearer  {key} "})).is_success


async def test_a_server_without_keys_ignores_the_clients_key(harness: Harness) -> None:
    assert (await harness.client.post("/generate", json=GENERATE, headers=bearer("x"))).status_code == 200


@pytest.mark.parametrize("key", ["first", "third", "schlüssel", "\ud800", "", "roo", "roott"])
def test_every_key_is_compared_in_constant_time(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    genuine = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        lengths.append((len(a), len(b)))
        return genuine(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    KEYS.caller(key)
    assert lengths == [(32, 32)] * 4


def test_a_tenant_reveals_nothing_about_its_key() -> None:
    first, second = KEYS.caller("first"), KEYS.caller("second")
    assert first is not None
    assert second is not None
    assert len({first.tenant, second.tenant}) == 2
    assert first == KEYS.caller("first")
    assert first != KeyRing(["first"]).caller("first")  # another key ring has another secret


async def test_tenants_never_share_a_prefix() -> None:
    harness = Harness(keys=KEYS)
    for key, body in (
        ("first", {}),
        ("second", {}),
        ("first", {"cache_salt": "s"}),
        ("second", {"cache_salt": "s"}),
        ("first", {}),
    ):
        await harness.client.post("/generate", json={**GENERATE, **body}, headers=bearer(key))
        await harness.client.post("/v1/completions", json={"prompt": "a", **body}, headers=bearer(key))
    salts = [call.cache_salt for call in harness.engine.calls]
    assert salts[::2] == salts[1::2]
    assert len(set(salts)) == 4
    assert salts[0] == salts[8]
    assert not any("first" in (salt or "") for salt in salts)


def test_without_keys_the_clients_salt_is_used() -> None:
    assert ANONYMOUS.cache_salt("s") == "s"
    assert ANONYMOUS.cache_salt(None) is None


GATEWAYS = KeyRing(["direct"], ["root"], ["gate", "new-gate"])


def tenant(name: str, key: str = "gate") -> dict[str, str]:
    return {**bearer(key), "X-Tenant": name}


async def calls_of(headers: dict[str, str], harness: Harness, **body: str) -> set[tuple[str, str | None]]:
    """The tenant and the salt with which a caller's prompts reach the engine, by each route."""
    harness.engine.calls.clear()
    bodies: dict[str, dict[str, object]] = {
        "/generate": {"text": "a"},
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    }
    for path, fields in bodies.items():
        response = await harness.client.post(path, json={**fields, **body}, headers=headers)
        assert response.status_code == 200
    assert len(harness.engine.calls) == len(bodies)
    return {(call.terms.tenant, call.cache_salt) for call in harness.engine.calls}


async def test_a_gateways_tenants_have_shares_and_pages_of_their_own() -> None:
    harness = Harness(keys=GATEWAYS)
    [(alice, salt)] = await calls_of(tenant("alice"), harness)
    [(bob, other_salt)] = await calls_of(tenant("bob"), harness)
    assert (alice, bob) == ("alice", "bob")
    assert None not in (salt, other_salt)
    assert salt != other_salt
    assert "alice" not in str(salt)
    assert await calls_of(tenant("alice", "new-gate"), harness) == {(alice, salt)}


async def test_a_tenant_cannot_become_another_by_its_body() -> None:
    """The salt that a client chooses comes behind a digest of fixed length."""
    harness = Harness(keys=GATEWAYS)
    [(_, victims)] = await calls_of(tenant("alice:x"), harness)
    for salt in ("x:", ":x", f"{victims}", "x"):
        [(name, found)] = await calls_of(tenant("alice"), harness, cache_salt=salt, user="alice:x")
        assert (name, found == victims) == ("alice", False)


@pytest.mark.parametrize("key", ["direct", "root"])
async def test_another_keys_tenant_header_changes_nothing(key: str) -> None:
    harness = Harness(keys=GATEWAYS)
    assert await calls_of(tenant("alice", key), harness) == await calls_of(bearer(key), harness)


async def test_a_gateway_key_closes_the_server_to_callers_without_one() -> None:
    harness = Harness(keys=KeyRing(gateway_keys=["gate"]))
    for headers in ({}, {"X-Tenant": "alice"}, tenant("alice", "wrong")):
        response = await harness.client.post("/generate", json=GENERATE, headers=headers)
        assert response.status_code == 401
    assert harness.engine.calls == []


@pytest.mark.parametrize(
    "named", [[], [""], [" "], ["a", "b"], ["alice", "alice"], ["a,b"], ["a b"], ["é"], ["x" * 257]]
)
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/abort"])
async def test_a_gateway_that_does_not_name_one_tenant_is_refused(named: list[str], path: str) -> None:
    harness = Harness(keys=GATEWAYS)
    headers = [(b"Authorization", b"Bearer gate"), *((b"X-Tenant", name.encode()) for name in named)]
    body = {"prompt": "a", "text": "a", "rid": "a", "messages": [{"role": "user", "content": "a"}]}
    response = await harness.client.post(path, json=body, headers=headers)
    assert (response.status_code, "X-Tenant" in response.text) == (400, True)
    assert harness.engine.calls == []


async def test_a_gateway_asks_for_models_and_metrics_in_its_own_name() -> None:
    harness = Harness(keys=GATEWAYS)
    for path in ("/v1/models", "/metrics", "/health", "/ready", "/server_info"):
        assert (await harness.client.get(path, headers=bearer("gate"))).status_code == 200
        assert (await harness.client.head(path, headers=bearer("gate"))).status_code == 200
    assert (await harness.client.post("/flush_cache", headers=tenant("alice"))).status_code == 403


async def test_the_tenants_header_can_have_another_name() -> None:
    harness = Harness(keys=KeyRing(gateway_keys=["gate"], tenant_header="X-Request-Id-Tenant"))
    headers = {**bearer("gate"), "x-request-id-tenant": "alice", "X-Tenant": "bob"}
    [(name, _)] = await calls_of(headers, harness)
    assert name == "alice"
    response = await harness.client.post("/generate", json=GENERATE, headers=tenant("bob"))
    assert (response.status_code, "X-Request-Id-Tenant" in response.text) == (400, True)


async def test_a_key_may_come_in_anthropics_header() -> None:
    harness = Harness(keys=KEYS)
    for key, status in (("first", 200), ("third", 401), ("", 401)):
        response = await harness.client.post("/generate", json=GENERATE, headers={"X-Api-Key": key})
        assert response.status_code == status


@pytest.mark.parametrize(("header", "other", "status"), [("third", "first", 401), ("first", "third", 200)])
async def test_authorization_comes_before_the_other_header(header: str, other: str, status: int) -> None:
    """A gateway that sets it leaves what its clients send in the other one."""
    headers = {**bearer(header), "X-Api-Key": other}
    response = await Harness(keys=KEYS).client.post("/generate", json=GENERATE, headers=headers)
    assert response.status_code == status


async def test_texts_are_worked_on_in_the_name_of_the_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    run, tenants = TextWorkers.run, list[str]()

    async def noted(self: TextWorkers, *args: Any, **kwargs: Any) -> object:
        tenants.append(current_tenant.get())
        return await run(self, *args, **kwargs)

    monkeypatch.setattr(TextWorkers, "run", noted)
    harness = Harness(keys=KEYS)
    for headers in (bearer("first"), {**bearer("gate"), "x-tenant": "t"}):
        response = await harness.client.post(CHAT, json={"messages": MESSAGES}, headers=headers)
        assert response.status_code == 200, response.text
    caller = KEYS.caller("first")
    assert caller is not None
    assert tenants == [caller.tenant, "t"]
    assert (await Harness().post(CHAT, {"messages": MESSAGES})).status_code == 200
    assert tenants[2:] == [""]
