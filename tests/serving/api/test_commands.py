from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shortfin_apps.llm.contract.errors import UnavailableError
from shortfin_apps.llm.serving.engine_link.messages import (
    AbortAll,
    AbortRequests,
    Command,
    ReadMetrics,
    SetLogLevel,
)
from shortfin_apps.llm.serving.http.auth import KeyRing
from tests.serving.api.harness import TOKENIZER, Harness
from tests.serving.api.scripted_engine import forever

ADMIN = {"Authorization": "Bearer root"}


class Elsewhere:
    """Stands for the other processes of a server: notes the commands, and counts as it is told."""

    def __init__(self, counts: Sequence[float]) -> None:
        self.counts = counts
        self.commands: list[Command] = []
        self.is_lost = False

    async def __call__(self, command: Command) -> Sequence[float]:
        if self.is_lost:
            raise UnavailableError("the process of the engine has ended")
        self.commands.append(command)
        return self.counts


@pytest.fixture
def elsewhere() -> Elsewhere:
    return Elsewhere([7.0])


@pytest.fixture
def harness(elsewhere: Elsewhere) -> Harness:
    made = Harness(forever(TOKENIZER, "a"), keys=KeyRing(["k"], ["root"]))
    made.service._model = replace(made.service.model, everywhere=elsewhere)
    return made


async def test_aborts_go_everywhere_with_the_callers_tenant(harness: Harness, elsewhere: Elsewhere) -> None:
    answer = await harness.client.post("/abort", json={"rid": ["a", "cmpl-b"]}, headers=ADMIN)
    assert answer.json() == {"aborted": 7}
    answer = await harness.client.post("/abort", json={"rid": "c"}, headers={"Authorization": "Bearer k"})
    assert answer.json() == {"aborted": 7}
    first, second = elsewhere.commands
    assert first == AbortRequests(("a", "b"), None)
    assert isinstance(second, AbortRequests)
    assert second.request_ids == ("c",)
    assert second.tenant


async def test_admin_routes_go_everywhere(harness: Harness, elsewhere: Elsewhere) -> None:
    assert (await harness.client.post("/abort_all", headers=ADMIN)).json() == {"aborted": 7}
    answer = await harness.client.post("/log_level", json={"level": "error"}, headers=ADMIN)
    assert answer.json() == {"level": "error"}
    assert elsewhere.commands == [AbortAll(), SetLogLevel("ERROR")]


async def test_metrics_show_the_sums(harness: Harness, elsewhere: Elsewhere) -> None:
    elsewhere.counts = [41.0 for _ in harness.service.metrics.counts()]
    text = (await harness.client.get("/metrics", headers=ADMIN)).text
    assert 'vllm:request_success_total{finished_reason="stop",model_name="m"} 41.0' in text.replace(
        harness.service.name, "m"
    )
    assert "vllm:num_requests_running" in text
    assert elsewhere.commands == [ReadMetrics()]


async def test_a_lost_engine_is_a_status(harness: Harness, elsewhere: Elsewhere) -> None:
    elsewhere.is_lost = True
    assert (await harness.client.get("/metrics", headers=ADMIN)).status_code == 503
    assert (await harness.client.post("/abort_all", headers=ADMIN)).status_code == 503
