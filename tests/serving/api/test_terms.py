from __future__ import annotations

import pytest

from shortfin_apps.llm.components.request.messages import MAX_PRIORITY, Terms
from shortfin_apps.llm.contract.errors import DeadlineExceededError, RequestAbortedError
from shortfin_apps.llm.serving.http.auth import KeyRing
from tests.serving.api.harness import TOKENIZER, Harness, events_of
from tests.serving.api.scripted_engine import aborting

BODIES: dict[str, dict[str, object]] = {
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}
PATHS = list(BODIES)


@pytest.mark.parametrize("path", PATHS)
async def test_terms_reach_the_engine(harness: Harness, path: str) -> None:
    await harness.post(path, {**BODIES[path], "priority": -3, "user": "u", "timeout_s": 2.5})
    assert harness.engine.calls[-1].terms == Terms(priority=-3, tenant="u", timeout_s=2.5)
    await harness.post(path, BODIES[path])
    assert harness.engine.calls[-1].terms == Terms()


async def test_the_tenant_is_the_keys_then_the_headers_then_the_fields() -> None:
    harness = Harness(keys=KeyRing(["first", "second"]))
    plain = Harness()
    body = {**BODIES["/generate"], "user": "u"}
    await plain.client.post("/generate", json=body, headers={"X-Tenant": "t"})
    assert plain.engine.calls[-1].terms.tenant == "t"
    tenants = []
    for key in ("first", "second"):
        headers = {"X-Tenant": "t", "Authorization": f"Bearer {key}"}
        await harness.client.post("/generate", json=body, headers=headers)
        tenants.append(harness.engine.calls[-1].terms.tenant)
    assert len({"t", "u", "", *tenants}) == 5


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", MAX_PRIORITY + 1), ("priority", 1.5), ("timeout_s", -1), ("timeout_s", "1"), ("user", 3)],
)
async def test_invalid_terms_are_refused_by_name(
    harness: Harness, path: str, field: str, value: object
) -> None:
    response = await harness.post(path, {**BODIES[path], field: value})
    assert response.status_code == 400
    assert f"`{field}`" in response.text


async def test_a_tenants_name_has_a_maximum_length(harness: Harness) -> None:
    response = await harness.post("/v1/completions", {"prompt": "a", "user": "u" * 257})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "user")


@pytest.mark.parametrize("path", PATHS)
async def test_a_timeout_before_the_first_token_is_an_error(path: str) -> None:
    harness = Harness(aborting(DeadlineExceededError("the request's time of 1 s is over")))
    for stream in (False, True):
        response = await harness.post(path, {**BODIES[path], "stream": stream})
        assert response.status_code == 408
        assert "DEADLINE_EXCEEDED" in str(response.json()["error" if "v1" in path else "code"])


async def test_a_timeout_after_some_tokens_is_a_partial_answer() -> None:
    late = aborting(DeadlineExceededError("the request's time of 1 s is over"), TOKENIZER.encode("ab"))
    openai = (await Harness(late).post("/v1/completions", BODIES["/v1/completions"])).json()
    assert (openai["choices"][0]["text"], openai["choices"][0]["finish_reason"]) == ("ab", "abort")
    native = (await Harness(late).post("/generate", BODIES["/generate"])).json()
    reason = native["responses"][0]["responses"][0]["meta_info"]["finish_reason"]
    assert reason == {"type": "abort", "message": "the request's time of 1 s is over"}


async def test_a_slow_readers_abort_has_a_message() -> None:
    slow = aborting(RequestAbortedError("the client reads too slowly"), TOKENIZER.encode("ab"))
    events = events_of(await Harness(slow).post("/generate", {"text": "a", "stream": True}))
    assert events[-1]["meta_info"]["finish_reason"]["message"] == "the client reads too slowly"
