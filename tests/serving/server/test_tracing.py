from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from shortfin_apps.llm.serving.server.config import ServerConfigError
from shortfin_apps.llm.serving.server.tracing import trace_provider, traces_url
from tests.serving.server.settings import parse

URL = "http://127.0.0.1:9"  # where nothing listens; no span is made
TRACED = ("DIR", "--otlp-endpoint", URL)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://host/otlp", "https://host/otlp/v1/traces"),
        ("https://host/otlp/v1/traces", "https://host/otlp/v1/traces"),
    ],
)
def test_spans_go_to_the_path_of_otlp_below_the_endpoint(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


def test_nothing_is_traced_or_imported_unless_somebody_asks() -> None:
    """But OpenTelemetry's API alone, which newer releases of FastAPI import."""
    script = """
import sys
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.server import http_server, service
from tests.serving.server.settings import parse

made = service.make_service(parse("DIR"), "m", ServerMetrics("m"))
http_server.http_config(parse("DIR"), made)
assert made.traces is None
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("argv", "environment", "name"),
    [
        (TRACED, {}, "shortfin-llm"),
        (TRACED, {"OTEL_SERVICE_NAME": "mine"}, "mine"),
        (TRACED, {"OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs,k=v"}, "theirs"),
        (("DIR",), {"OTEL_EXPORTER_OTLP_ENDPOINT": URL}, "shortfin-llm"),
        (("DIR",), {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": URL}, "shortfin-llm"),
    ],
)
def test_the_endpoint_is_asked_for_by_flag_or_variable_and_the_service_has_a_name(
    argv: tuple[str, ...], environment: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    provider = trace_provider(parse(*argv))
    assert provider is not None
    assert provider.resource.attributes["service.name"] == name
    provider.shutdown()


@pytest.mark.parametrize("off", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_opentelemetrys_variables_turn_it_off_which_is_said(
    off: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert trace_provider(parse(*TRACED), off) is None
    assert "--otlp-endpoint has no effect" in caplog.text


def test_another_protocol_is_refused_for_the_flag_and_missed_for_a_variable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grpc = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    with pytest.raises(ServerConfigError, match="not by grpc"):
        trace_provider(parse(*TRACED), grpc)
    assert trace_provider(parse("DIR"), {**grpc, "OTEL_EXPORTER_OTLP_ENDPOINT": URL}) is None
    assert "none are exported" in caplog.text


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("OTEL_BSP_SCHEDULE_DELAY", "0", "schedule_delay_millis must be positive"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "x", "must be a non-negative integer but got x"),
        ("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "nobodys", "'nobodys' not found"),
    ],
)
def test_a_wrong_variable_is_refused_for_the_flag_and_named_otherwise(
    variable: str, value: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ServerConfigError, match=f"--otlp-endpoint: .*{why}"):
        trace_provider(parse(*TRACED))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", URL)
    assert trace_provider(parse("DIR")) is None
    assert why in caplog.text


def test_the_extra_must_be_installed_for_the_flag_and_is_missed_for_a_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    modules: dict[str, Any] = sys.modules
    monkeypatch.setitem(modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ServerConfigError, match=r"shortfin-llm\[tracing\]"):
        trace_provider(parse(*TRACED))
    assert trace_provider(parse("DIR"), {"OTEL_EXPORTER_OTLP_ENDPOINT": URL}) is None
    assert "none are exported" in caplog.text


@pytest.mark.parametrize(
    "endpoint", ["collector:4318", "grpc://host", "http://me:secret@host", "http://a?key=b"]
)
def test_an_endpoint_is_a_url_without_secrets(endpoint: str) -> None:
    with pytest.raises(ServerConfigError, match="OTEL_EXPORTER_OTLP_HEADERS"):
        parse("DIR", "--otlp-endpoint", endpoint)
