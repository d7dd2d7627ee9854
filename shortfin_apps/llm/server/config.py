"""What a server can be told: one class that feeds flags, environment, YAML, `--help` and `/server_info`.

Precedence: flags, then `SHORTFIN_LLM_*` variables, then `--config` (YAML; upstream's JSON
`--server_config` is read the same way), then the defaults below. Every flag is spelled with dashes or
underscores. Upstream shortfin's flags are accepted: under our names where we have them, and otherwise
noted in the log and ignored, as they tune what is not here. Logging is set up by these settings, so what
there is to note goes to whoever reads them.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from shortfin_apps.llm.errors import LlmError

logger = logging.getLogger(__name__)

ENV_PREFIX = "SHORTFIN_LLM_"
# Variables with the prefix that are no settings of a server: where `build` keeps its copies.
OTHER_VARIABLES = frozenset({"CACHE"})
# Kubernetes sets NAME_PORT=tcp://ADDRESS:PORT and more in every pod, for every Service: one named
# `shortfin-llm` writes over the variable of `--port`.
SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://\S+")
SERVICE_VARIABLE = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
KEY = re.compile(r"(?!,+$)[\x21-\x7e]+")  # commas alone are a list of nothing

# Upstream's word: ours.
UPSTREAM_NAMES = {
    "model_config": "model_config_json",  # pydantic keeps `model_config` for itself
    "prefix_sharing_algorithm": "prefix_cache",
    "server_config": "config",
}
# Upstream's words for what is not here, with how many values each takes on the command line.
UPSTREAM_IGNORED: dict[str, Literal["flag", "value"]] = {
    "program_isolation": "value",
    "use_native_impls": "flag",
    "amdgpu_async_allocations": "flag",
    "amdgpu_async_caching": "flag",
    "amdgpu_allow_device_reuse": "flag",
    "amdgpu_allocators": "value",
    "decode_config": "value",
}

# Devices that are no CPU.
GPU_NAMES = ("hip", "amdgpu")
SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
KEYS = ("api_key", "admin_api_key")
KEY_FILES = ("api_key_file", "admin_api_key_file")
# Settings for which an empty text says something: no prefix, no list. An empty host would be every address.
MAY_BE_EMPTY = ("root_path", "parameters", "device_ids", "cors_origin", "tenant_weights")

Note = Callable[[str], None]  # takes a sentence about a setting that has no effect


class ServerConfigError(LlmError):
    """The server cannot start as it was told to."""


class ServerConfig(BaseSettings):
    """The description of a field is its help."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        validate_default=False,  # an empty list of keys is wrong only where somebody set it
    )

    artifact: Path | None = Field(None, description="model directory that `shortfin-llm build` made")
    tokenizer_json: Path | None = Field(None, description="tokenizer.json, instead of a model directory")
    tokenizer_config_json: Path | None = Field(
        None, description="its tokenizer_config.json (default: <stem>_config.json beside it)"
    )
    model_config_json: Path | None = Field(
        None, description="config.json of the VMFB, instead of a model directory"
    )
    vmfb: Path | None = Field(None, description="compiled model, instead of a model directory")
    parameters: Annotated[tuple[Path, ...], NoDecode] = Field(
        (), description="parameter files (irpa, gguf, safetensors), instead of a model directory"
    )
    verify: Literal["none", "size", "hash"] = Field(
        "hash",
        description="what of a model directory is compared with its manifest before the server is ready",
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="the model's name in the API (default: its source's)"
    )

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 opens it to the network")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    root_path: str = Field("", description="path prefix that a proxy in front strips")
    timeout_keep_alive: int = Field(5, ge=1, description="seconds to keep an idle connection")
    shutdown_timeout: float = Field(
        30.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds that running requests get to finish after Ctrl-C or SIGTERM",
    )
    drain_delay: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds after Ctrl-C or SIGTERM in which /ready says 503 and requests are still taken, "
        "so that a load balancer notices first",
    )
    read_timeout: float = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds in which a request must have arrived whole, or its connection is closed",
    )
    limit_concurrency: int = Field(
        4096, ge=1, description="connections at once; requests on more are answered 503"
    )
    ssl_keyfile: Path | None = Field(None, description="TLS: the private key (PEM)")
    ssl_certfile: Path | None = Field(None, description="TLS: the certificate chain (PEM); turns TLS on")
    ssl_keyfile_password: SecretStr | None = Field(None, description="TLS: password of the private key")
    api_key: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (), description="key that requests must send as `Authorization: Bearer KEY`; may be repeated"
    )
    api_key_file: Path | None = Field(None, description="file with more API keys, one a line")
    admin_api_key: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (), description="key that opens /abort_all, /flush_cache and /log_level too; may be repeated"
    )
    admin_api_key_file: Path | None = Field(None, description="file with more admin keys, one a line")
    cors_origin: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="origin whose pages may call from a browser, or *; may be repeated (default: none)"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="how much to log")
    log_format: Literal["text", "json"] = Field(
        "text", description="lines of the log: text for people, or JSON for what collects them"
    )

    runtime: Literal["auto", "shortfin", "iree"] = Field("auto", description="what runs the VMFB")
    device: str = Field("cpu", description="cpu (also local-task, hostcpu), or hip (also amdgpu)")
    device_ids: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="GPUs to use, one per pipeline stage: indices or names"
    )
    threads: int | None = Field(None, ge=1, description="CPU workers (default: all CPUs)")

    batch_mode: Literal["default", "extend-attention"] = Field(
        "default", description="how requests are cut into chunks and batched"
    )
    chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="length of a prefill chunk in tokens, rounded up to pages (default: 128, and longer "
        "where a budget has room; given without a budget, the default mode's chunks are never longer)",
    )
    chunk_block_size: int | None = Field(None, ge=1, description="the same in pages (upstream's flag)")
    token_budget: int | None = Field(
        None,
        ge=1,
        description="the most tokens in one invocation; in the default mode, of prefill (default: beside "
        "running streams 320 in the default mode, 256 in extend-attention)",
    )
    max_pages_per_batch: int | None = Field(
        None, ge=2, description="the same in pages, instead of --token-budget"
    )
    idle_budget: int | None = Field(
        None,
        ge=1,
        description="--token-budget for when no stream waits (default: --token-budget if given, or 512)",
    )
    prefills_per_decode: int = Field(
        1, ge=1, description="default mode: prefill invocations for each decode, when both have work"
    )
    max_running: int | None = Field(
        None, ge=1, description="requests in progress at once (default: the largest decode batch, or 256)"
    )
    prefix_cache: Literal["none", "trie"] = Field(
        "trie", description="whether requests share the pages of a common prefix"
    )
    pages: int | None = Field(
        None, ge=2, description="pages of the KV cache, in place of the config's device_block_count"
    )
    max_queue: int = Field(
        256, ge=1, description="requests that may wait beside the running ones; more are answered 429"
    )
    max_body_bytes: int = Field(4 << 20, ge=1, description="largest body of a request; more is answered 413")
    max_json_depth: int = Field(32, ge=1, description="arrays and objects inside each other in a body")
    max_prompts: int = Field(256, ge=1, description="prompts in one request")
    max_prompt_chars: int = Field(1_000_000, ge=1, description="characters of one prompt or conversation")
    max_n: int = Field(128, ge=1, description="choices for one prompt")
    max_stops: int = Field(16, ge=0, description="stop strings of one request")
    max_stop_chars: int = Field(1024, ge=1, description="characters of one stop string")
    max_logprobs: int = Field(20, ge=0, le=20, description="alternatives reported for a token")
    strict_fields: bool = Field(
        False, description="refuse requests with fields that are unknown, instead of ignoring those"
    )
    special_in_content: bool = Field(
        True,
        description="whether the names of special tokens in messages become those tokens, or stay plain text",
    )
    max_queue_tokens: int = Field(
        131_072, ge=1, description="prompt tokens that may wait for their first token; more are answered 429"
    )
    request_timeout: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="seconds a request may take, waiting included (default: no limit)",
    )
    stall_timeout: float = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds of one invocation after which the device counts as dead",
    )
    send_timeout: float = Field(
        30.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds after which a client that does not read its answer is cut off",
    )
    max_long_prefills: int = Field(
        2, ge=1, description="long prompts that are prefilled at once, so that short ones get by"
    )
    long_prefill_tokens: int = Field(
        1024, ge=1, description="tokens left to prefill above which a prompt is long"
    )
    tenant_weights: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="shares of tenants, as NAME=WEIGHT; a tenant that is not named has 1"
    )
    default_temperature: float | None = Field(
        None, ge=0, le=100, description="temperature of requests that name none (default: the model's)"
    )
    num_beams: int = Field(
        1, ge=1, description="beams of /generate requests that name none; 1 is no beam search"
    )

    @field_validator("parameters", "device_ids", "cors_origin", "tenant_weights", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        """Environment variables hold lists with commas."""
        return tuple(part for part in value.split(",") if part) if isinstance(value, str) else value

    @field_validator(*KEYS, mode="before")
    @classmethod
    def _split_keys(cls, value: object) -> object:
        """Nothing is dropped: a key that is missing would leave the server open, or a caller outside."""
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("*", mode="before")
    @classmethod
    def _set_but_empty(cls, value: object, info: ValidationInfo) -> object:
        """Refuses empty values: those of an unset variable or a template must not pass for the default."""
        is_missing_key = value is None and info.field_name in (*KEYS, *KEY_FILES)
        if is_missing_key or (value == "" and info.field_name not in MAY_BE_EMPTY):
            raise ValueError("it is set but empty; give a value, or do not set it at all")
        return value

    @field_validator(*KEYS)
    @classmethod
    def _no_empty_key(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not value or not all(key.get_secret_value() for key in value):
            raise ValueError("a key in it is empty; give each key, or do not set it at all")
        return value

    @field_validator("tenant_weights")
    @classmethod
    def _weights_parse(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            name, _, weight = entry.rpartition("=")
            is_number = re.fullmatch(r"\d+(\.\d+)?", weight) is not None
            # Beyond, a tenant's service is lost in the rounding of another's.
            if not name or not is_number or not 0.001 <= float(weight) <= 1000:
                raise ValueError(f"{entry!r} must be a tenant's name, `=` and a number from 0.001 to 1000")
        return value

    @property
    def weight_of_tenant(self) -> dict[str, float]:
        """`tenant_weights` by name."""
        pairs = [entry.rpartition("=") for entry in self.tenant_weights]
        return {name: float(weight) for name, _, weight in pairs}

    @field_validator("batch_mode", mode="before")
    @classmethod
    def _either_spelling(cls, value: object) -> object:
        """Upstream writes modes with underscores."""
        return value.replace("_", "-") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_model(self) -> ServerConfig:
        pieces = {"--tokenizer_json": self.tokenizer_json, "--model_config": self.model_config_json}
        pieces["--vmfb"] = self.vmfb
        others = {
            "--parameters": self.parameters or None,
            "--tokenizer_config_json": self.tokenizer_config_json,
        }
        given = [flag for flag, value in {**pieces, **others}.items() if value is not None]
        missing = [flag for flag in pieces if flag not in given]
        if self.artifact is not None and given:
            raise ValueError(f"give a model directory or {given[0]}, not both")
        if self.artifact is None and not given:
            raise ValueError("name the model directory to serve: `shortfin-llm serve DIR`")
        if self.artifact is None and missing:
            raise ValueError(f"without a model directory, {missing[0]} is needed too")
        return self

    @model_validator(mode="after")
    def _one_budget(self) -> ServerConfig:
        if self.token_budget is not None and self.max_pages_per_batch is not None:
            raise ValueError("give --token-budget or --max-pages-per-batch, not both")
        if self.chunk_tokens is not None and self.chunk_block_size is not None:
            raise ValueError("give --chunk-tokens or --chunk-block-size, not both")
        return self

    @model_validator(mode="after")
    def _whole_tls(self) -> ServerConfig:
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_keyfile_password):
            raise ValueError("TLS needs a certificate: give --ssl-certfile too")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # `load` layers them


def load(
    flags: Mapping[str, Any], yaml_values: Mapping[str, Any], note: Note = logger.warning
) -> ServerConfig:
    """Flags over environment over YAML over defaults. Raises ServerConfigError."""
    try:
        config = ServerConfig(**{**yaml_values, **_environment(note), **flags})
    except ValidationError as error:
        raise ServerConfigError(_first_problem(error)) from None
    for setting, why in _without_effect(config):
        note(f"`{setting}` has no effect: {why}")
    return config


def read_yaml(path: Path, note: Note = logger.warning) -> dict[str, Any]:
    """The settings in a file, under our names. Raises ServerConfigError."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ServerConfigError(f"{path}: not readable as YAML ({error})") from error
    if not isinstance(raw, dict):
        raise ServerConfigError(f"{path}: must hold settings by name")
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if value is None and name not in (*KEYS, *KEY_FILES):
            continue  # upstream's way to leave a setting alone
        if name in UPSTREAM_IGNORED:
            note_ignored(name, value, note)
        else:
            values[UPSTREAM_NAMES.get(name, name)] = value
    return values


def read_keys(given: Sequence[SecretStr], path: Path | None) -> list[str]:
    """The keys that were given and those in the file, where empty lines and those with # are none.

    Raises ServerConfigError, which tells no key.
    """
    keys = [key.get_secret_value() for key in given]
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ServerConfigError(f"{path}: cannot be read as a file of keys ({error})") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ServerConfigError(f"{path}: holds no key; write one a line")
        keys += found
    if not all(KEY.fullmatch(key) for key in keys):
        raise ServerConfigError("a key must be made of visible ASCII characters, without spaces")
    return keys


def _environment(note: Note) -> dict[str, Any]:
    """The settings in variables. What looks like one and is none, as a misspelt one does, is noted."""
    values = EnvSettingsSource(ServerConfig)()
    if SERVICE_LINK.fullmatch(str(values.get("port"))):
        link = values.pop("port")
        note(
            f"the variable `{ENV_PREFIX}PORT` is {link!r}, which Kubernetes sets for a Service of that name, "
            "and is ignored; `enableServiceLinks: false` in the pod's spec keeps it away"
        )
    for variable in _unknown_variables():
        note(f"the variable {variable} names no setting and has no effect; `--help` lists the settings")
    return values


def _unknown_variables() -> Iterator[str]:
    for variable in os.environ:
        prefix, name = variable[: len(ENV_PREFIX)].upper(), variable[len(ENV_PREFIX) :].upper()
        is_known = name.lower() in ServerConfig.model_fields or name in OTHER_VARIABLES
        if prefix == ENV_PREFIX and not is_known and not SERVICE_VARIABLE.fullmatch(name):
            yield variable


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        return f"there is no setting `{name}`; `--help` lists them"
    given = "" if name in SECRETS or problem["input"] in ("", None) else f", not {problem['input']!r}"
    return f"`--{name.replace('_', '-')}`: {message}{given}"


def note_ignored(name: str, value: object, note: Note) -> None:
    """Says so once for each of upstream's settings, those inside `decode_config` by name."""
    inner = [f"{name}.{key}" for key in value] if isinstance(value, Mapping) else [name]
    for each in inner:
        own = each.rpartition(".")[2]
        instead = f"; set `{own}` at the top level instead" if own in ServerConfig.model_fields else ""
        note(f"upstream's setting `{each}` has no effect here{instead}")


def _without_effect(config: ServerConfig) -> Iterator[tuple[str, str]]:
    """Settings that another one makes void, and why."""
    on_gpu = config.device in GPU_NAMES
    if config.device_ids and not on_gpu:
        yield "--device-ids", f"it chooses GPUs, and the device is {config.device}"
    if config.threads is not None and (on_gpu or config.runtime == "shortfin"):
        yield "--threads", "only the iree runtime on a CPU takes it"
    if "prefills_per_decode" in config.model_fields_set and config.batch_mode != "default":
        yield "--prefills-per-decode", "it belongs to `--batch-mode default`"
