"""The Grafana dashboard and the alert rules: every query against a real server and a real Prometheus.

Grafana is on neither Debian nor PyPI: what reads the dashboard is the SDK that its schemas generate.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from promql_parser import MatchOp

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.serving.server.config import ServerConfig
from tests.deploy.monitoring import (
    ALERT_TESTS,
    ALERTS,
    PROMTOOL,
    alerts,
    dashboard,
    needs_prometheus,
    panel_queries,
    panels,
    prometheus,
    selectors,
    use,
)
from tests.integration.server_process import Service, start, stop

PROMETHEUS_OWN = {"up", "instance", "job"}  # what Prometheus adds


@pytest.fixture(scope="module")
def service(tiny_artifact: Artifact) -> Iterator[Service]:
    """A server that proposes tokens, and names a tenant."""
    started = start(tiny_artifact, "--speculative", "ngram", "--tenant-weights", "alice=2")
    try:
        use(started)
        yield started
    finally:
        assert stop(started) == 0


@pytest.fixture(scope="module")
def samples(service: Service) -> list[Sample]:
    text = httpx.get(f"{service.url}/metrics").text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def unexposed(query: str, samples: list[Sample]) -> list[str]:
    """The metrics of a query of which the server has no sample with these labels."""
    missing = []
    for selector in selectors(query):
        asked = [each for each in selector.matchers.matchers if each.name not in PROMETHEUS_OWN]
        exact = {each.name: each.value for each in asked if each.op == MatchOp.Equal}
        if selector.name not in PROMETHEUS_OWN and not any(
            sample.name == selector.name
            and {each.name for each in asked} <= set(sample.labels)
            and exact.items() <= sample.labels.items()
            for sample in samples
        ):
            missing.append(str(selector))
    return missing


@pytest.mark.parametrize(("title", "query"), panel_queries())
def test_the_dashboard_reads_metrics_that_a_server_has(title: str, query: str, samples: list[Sample]) -> None:
    assert selectors(query)
    assert unexposed(query, samples) == []


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert["alert"]))
def test_alerts_read_metrics_that_a_server_has(alert: dict[str, Any], samples: list[Sample]) -> None:
    assert selectors(alert["expr"])
    assert unexposed(alert["expr"], samples) == []


def test_a_metric_that_nobody_has_is_noticed(samples: list[Sample]) -> None:
    assert unexposed('rate(vllm:num_preemption_total[1m]) + up{job="a"}', samples)
    assert unexposed('vllm:request_success_total{finished_reason="bored"}', samples)
    assert unexposed('vllm:num_requests_running{tenant=~".*"}', samples)


def lost(ours: Any, read: Any, path: str = "") -> Iterator[str]:
    """Where `read` has not what we wrote."""
    if isinstance(ours, dict):
        for name, value in ours.items():
            yield from lost(value, read.get(name) if isinstance(read, dict) else None, f"{path}.{name}")
    elif isinstance(ours, list):
        padded = [*read, *[None] * len(ours)] if isinstance(read, list) else [None] * len(ours)
        for index, value in enumerate(ours):
            yield from lost(value, padded[index], f"{path}[{index}]")
    elif ours != read:
        yield f"{path}: {ours!r} became {read!r}"


def test_grafanas_sdk_reads_the_whole_dashboard() -> None:
    register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard())))
    assert list(lost(dashboard(), read)) == []
    wrong = dashboard()
    wrong["panels"][1]["gridpos"] = {"x": 0}
    assert list(lost(wrong, json.loads(JSONEncoder().encode(Dashboard.from_json(wrong)))))


def test_panels_do_not_overlap_and_ask_the_chosen_data_source() -> None:
    everything = dashboard()["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    for one, other in combinations((panel["gridPos"] for panel in everything), 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert is_beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    for panel in panels():
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    names = [variable["name"] for variable in dashboard()["templating"]["list"]]
    assert names == ["datasource", "model", "instance"]


@needs_prometheus
def test_prometheus_answers_every_query_of_the_dashboard_and_loads_the_alerts(
    service: Service, tmp_path: Path
) -> None:
    with prometheus(service.url, tmp_path) as running:
        running.until("count_over_time(shortfin_llm:ready[1m]) >= 2")
        use(service)
        generated = "vllm:generation_tokens_total - vllm:generation_tokens_total offset 1s"
        running.until(f"max_over_time(({generated})[1m:1s]) > 0")
        for title, query in panel_queries():
            values = [float(sample["value"][1]) for sample in running.query(query)]
            assert not all(map(math.isnan, values)), f"{title} has no data: {query}"
        for variable in dashboard()["templating"]["list"][1:]:
            inner, _, label = variable["query"]["query"].removeprefix("label_values(").rpartition(", ")
            [sample] = running.query(inner.replace("$model", ".*"))
            assert sample["metric"][label.rstrip(")")]
        rules = running.rules()
    assert [rule["name"] for rule in rules] == [alert["alert"] for alert in alerts()]
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    assert {rule["state"] for rule in rules} == {"inactive"}


@needs_prometheus
@pytest.mark.parametrize("words", [("check", "rules", str(ALERTS)), ("test", "rules", str(ALERT_TESTS))])
def test_promtool_accepts_the_alerts_and_they_fire_when_they_should(words: tuple[str, ...]) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_tested_firing_and_not_firing() -> None:
    names = [alert["alert"] for alert in alerts()]
    calm, *firing = yaml.safe_load(ALERT_TESTS.read_text(encoding="utf-8"))["tests"]
    assert [each["alertname"] for each in calm["alert_rule_test"]] == names
    assert not any(each["exp_alerts"] for each in calm["alert_rule_test"])
    assert [test["name"] for test in firing] == names
    for test in firing:
        each = test["alert_rule_test"][0]
        assert each["alertname"] == test["name"]
        assert each["exp_alerts"]


def test_alerts_advise_flags_that_exist() -> None:
    flags = set(re.findall(r"--([a-z-]+)", ALERTS.read_text(encoding="utf-8")))
    assert {"max-queue", "stall-timeout"} <= flags
    assert {flag.replace("-", "_") for flag in flags} <= set(ServerConfig.SETTINGS)
