"""Creates the trace provider from the settings and OpenTelemetry's variables; needs the extra `tracing`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shortfin_apps.llm import __version__
from shortfin_apps.llm.serving.server.config import ServerConfig, ServerConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
PATH = "/v1/traces"


def trace_provider(
    config: ServerConfig, environment: Mapping[str, str] = os.environ
) -> TracerProvider | None:
    """Return the provider that creates and exports spans; None if traces are off or not possible.

    If traces are off, no package is imported. Raises ServerConfigError if traces are not possible (a missing
    package, an unsupported protocol, invalid variables) although `--otlp-endpoint` asks for them.
    """
    if not _is_wanted(config, environment):
        return None
    protocol = next((environment[name] for name in PROTOCOL_VARIABLES if environment.get(name)), PROTOCOL)
    if protocol != PROTOCOL:
        _refuse(
            config, f"spans are exported by {PROTOCOL} alone, not by {protocol} ({PROTOCOL_VARIABLES[1]})"
        )
        return None
    try:
        return _provider(config, environment)
    except ImportError:
        _refuse(config, "traces need `pip install 'shortfin-llm[tracing]'`")
    except Exception as error:  # the SDK raises ValueError and RuntimeError for invalid variables
        _refuse(config, f"OpenTelemetry refuses its settings ({error}); correct its `OTEL_...` variables")
    return None


def _provider(config: ServerConfig, environment: Mapping[str, str]) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from shortfin_apps.llm.serving.server.span_export import BoundedProvider, bounded_session

    resource = Resource.create({"service.version": __version__, "process.pid": os.getpid()})
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "shortfin-llm"}))
    provider = BoundedProvider(resource)
    endpoint = None if config.http.otlp_endpoint is None else traces_url(config.http.otlp_endpoint)
    exporter = OTLPSpanExporter(endpoint=endpoint, session=bounded_session(environment))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def traces_url(endpoint: str) -> str:
    """Return the URL for posting spans: like the SDK, append OTLP's path to a base URL."""
    base = endpoint.rstrip("/")
    return base if base.endswith(PATH) else base + PATH


def _is_wanted(config: ServerConfig, environment: Mapping[str, str]) -> bool:
    asks = config.http.otlp_endpoint is not None or any(environment.get(name) for name in ENDPOINT_VARIABLES)
    is_off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if not asks or is_off or environment.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        if config.http.otlp_endpoint is not None:
            logger.warning("--otlp-endpoint has no effect: OTEL_SDK_DISABLED or OTEL_TRACES_EXPORTER is set")
        return False
    return True


def _refuse(config: ServerConfig, reason: str) -> None:
    """Raise ServerConfigError if `--otlp-endpoint` is set. Else warn: variables may be set machine-wide."""
    if config.http.otlp_endpoint is not None:
        raise ServerConfigError(f"--otlp-endpoint: {reason}")
    logger.warning("%s; none are exported", reason)
