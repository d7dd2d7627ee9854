"""Server settings: address, connections, keys and log."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode

from shortfin_apps.llm.serving.api.auth import TENANT_HEADER


class HttpSettings(BaseSettings):
    """Addresses, access and timeouts."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 opens it to the network")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    root_path: str = Field("", description="path prefix that a reverse proxy strips")
    # nginx's value: a client pool with a shorter keep-alive never sends on a connection that is being closed.
    shutdown_timeout: float = Field(
        30.0, ge=0, description="seconds for running requests to finish after Ctrl-C or SIGTERM"
    )
    drain_delay: float = Field(
        0.0,
        ge=0,
        description="seconds after Ctrl-C or SIGTERM during which /ready answers 503 but requests are still "
        "accepted, so that a load balancer notices first",
    )
    read_timeout: float = Field(
        60.0, gt=0, description="seconds for a whole request to arrive before its connection is closed"
    )
    api_processes: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that answer HTTP, for fast GPUs (docs/api_processes.md)",
    )
    ssl_keyfile: Path | None = Field(None, description="TLS: the private key (PEM)")
    ssl_certfile: Path | None = Field(None, description="TLS: the certificate chain (PEM); turns TLS on")
    api_key: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (),
        description="key for `Authorization: Bearer KEY`, or @FILE with keys, one a line; repeatable "
        "(default: none needed)",
    )
    admin_api_key: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (), description="key, or @FILE, that also allows /abort_all, /flush_cache and /log_level; repeatable"
    )
    gateway_key: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (),
        description="key of a gateway, or @FILE; its requests name their tenant in --tenant-header, which "
        "is believed of no other key; repeatable",
    )
    tenant_header: str = Field(
        TENANT_HEADER,
        pattern=r"^[A-Za-z0-9-]+$",
        description="header in which a gateway names the tenant, for routers between it and the server that "
        "pass on certain headers alone, as smg does X-Request-Id-Tenant",
    )
    cors_origin: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="origin whose pages may call from a browser, or *; repeatable (default: none)"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level to log"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="format of log lines: text for people, or JSON for log collectors"
    )
    otlp_endpoint: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector, such as http://localhost:4318, to which traces of "
        "requests are exported by OTLP over HTTP; needs the extra `tracing`. The OTEL_... variables say the "
        "rest, the sampler too (docs/observability.md)",
    )
    # The HTML standard's advice for event streams, and half the shortest common timeout (30 s).

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_otlp_endpoint(cls, value: str | None) -> str | None:
        """Refuse a URL that may contain keys, as `/server_info` shows it."""
        if value is not None and not re.fullmatch(r"https?://[^\s@?#]+", value):
            raise ValueError(
                "it must be http:// or https:// and a host, without user, query or spaces; "
                "OTEL_EXPORTER_OTLP_HEADERS authenticates"
            )
        return value

    @model_validator(mode="after")
    def _check_certificate(self) -> HttpSettings:
        if self.ssl_certfile is None and self.ssl_keyfile:
            raise ValueError("TLS needs a certificate: give --ssl-certfile too")
        return self
