"""The dashboard's and the alerts' expressions, a server that has every metric, and Prometheus itself."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml
from promql_parser import VectorSelector

from tests.integration.server_process import PATIENCE_S, Service

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana/shortfin-llm.json"
ALERTS = DEPLOY / "prometheus/alerts.yml"
ALERT_TESTS = Path(__file__).with_name("alerts_test.yml")
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")

needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="prometheus is not installed (Debian: prometheus)"
)


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def panel_queries() -> list[tuple[str, str]]:
    """The titles of the panels with their queries, as Grafana asks them for all servers."""
    chosen = {"$__rate_interval": "1m", "$instance": ".*", "$model": ".*"}
    found = []
    for panel in panels():
        for target in panel["targets"]:
            query = target["expr"]
            for variable, value in chosen.items():
                query = query.replace(variable, value)
            found.append((f"{panel['title']}: {target['legendFormat']}", query))
    return found


def alerts() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def selectors(query: str) -> list[VectorSelector]:
    """The metrics that a query reads, with what it asks of their labels."""
    found: list[VectorSelector] = []

    def visit(node: object) -> bool:
        if isinstance(node, VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(query), visit)
    return found


def use(service: Service) -> None:
    """Sends requests of all kinds that metrics tell apart."""
    for body in (
        {
            "prompt": "one two one two one two one two " * 9,
            "max_tokens": 16,
            "ignore_eos": True,
            "user": "alice",
        },
        {"prompt": "a", "max_tokens": 2},
        {"prompt": "a", "max_tokens": -1},
    ):
        httpx.post(f"{service.url}/v1/completions", json={"temperature": 0, **body}, timeout=60)


class RunningPrometheus:
    """A real Prometheus that scrapes one server each second, with the alerts loaded."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def query(self, query: str) -> list[dict[str, Any]]:
        """The samples of an instant query."""
        samples: list[dict[str, Any]] = self._get("/api/v1/query", query=query)["result"]
        return samples

    def rules(self) -> list[dict[str, Any]]:
        [group] = self._get("/api/v1/rules")["groups"]
        rules: list[dict[str, Any]] = group["rules"]
        return rules

    def until(self, query: str) -> None:
        """Waits until a query has a result."""
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                if self.query(query):
                    return
            except (httpx.TransportError, httpx.HTTPStatusError):  # it starts
                pass
            assert time.monotonic() < give_up_s, f"Prometheus never had a result of {query}"
            time.sleep(0.2)

    def _get(self, path: str, **parameters: str) -> Any:
        answer = self._client.get(path, params=parameters)
        assert answer.status_code != 400, answer.text
        answer.raise_for_status()
        return answer.json()["data"]


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[RunningPrometheus]:
    """Prometheus with an empty store in `folder`, scraping `target`, a URL."""
    assert PROMETHEUS is not None
    scrape = {"job_name": "llm", "static_configs": [{"targets": [target.removeprefix("http://")]}]}
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [scrape],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                *(PROMETHEUS, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder}"),
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            with httpx.Client(base_url=f"http://{address}", timeout=30) as client:
                yield RunningPrometheus(client)
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
            print((folder / "log").read_text())
