"""Server settings: device, batching, KV cache and speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode

from shortfin_apps.llm.components.batching import MODE_CHOICES
from shortfin_apps.llm.components.batching.modes.default import DefaultModeOptions
from shortfin_apps.llm.components.batching.scheduler import DEFAULT_SCHEDULING
from shortfin_apps.llm.components.kv_events.options import is_endpoint
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.self_test.options import When
from shortfin_apps.llm.components.speculation.draft import DEFAULT_MAX_TOKENS
from shortfin_apps.llm.serving.frontend.async_engine import STALL_TIMEOUT_S


class EngineSettings(BaseSettings):
    """How requests are computed."""

    runtime: Literal["auto", "shortfin", "iree"] = Field("auto", description="runtime that executes the VMFB")
    device: str = Field(
        "cpu",
        description="cpu, hip (AMD GPUs) or cuda (NVIDIA GPUs); for a source on a GPU with the chip, as "
        "hip:gfx942",
    )
    device_ids: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="GPUs to use, one per pipeline stage: indices or names"
    )
    threads: int | None = Field(None, ge=1, description="CPU workers (default: all CPUs)")

    batch_mode: Literal[*MODE_CHOICES] = Field(  # type: ignore[valid-type]
        "auto",
        description="default (prefill and decode alternate), extend-attention (both in one invocation) or "
        "auto: extend-attention on GPUs, unless a setting of the default mode is given, else default",
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
        description="maximum tokens of an invocation, in the default mode of a prefill (default: 320, in "
        "extend-attention 256, on GPUs 512 or more, measured at the start)",
    )
    idle_budget: int | None = Field(
        None,
        ge=1,
        description="--token-budget while no request decodes (default: --token-budget if given, or 512, on "
        "GPUs 2048)",
    )
    min_budget: int | None = Field(
        None,
        ge=1,
        description="most tokens of prompts beside decodes while few prompt tokens wait, of 1,024 at most; "
        "proportionally more while more wait, up to --token-budget (default: on CPUs as many as take as long "
        "as 16 decodes, measured at the start; else --token-budget)",
    )
    tune: bool = Field(
        True,
        description="measure the device's speed at the start to choose budgets that are not given: on CPUs "
        "--min-budget, on GPUs --token-budget",
    )
    prefills_per_decode: int = Field(
        DefaultModeOptions().prefills_per_decode,
        ge=1,
        description="default mode: prefill invocations per decode, when both have work",
    )
    max_running: int | None = Field(
        None,
        ge=1,
        description="maximum requests in progress (default: the largest decode batch, or 256)",
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
        description="speculate by prompt lookup (ngram); the tokens stay the same",
    )
    speculative_model: Path | None = Field(
        None,
        description="a smaller model with the same tokenizer that drafts tokens, named as MODEL is; the "
        "tokens stay the same",
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
        description="pages of the KV cache, or auto: all free memory (default: as given to `build`, else "
        "auto on GPUs, and on CPUs 8 full contexts, at most 1 GiB)",
    )
    self_test: When = Field(
        "start",
        description="compare what the model computes for a few prompts with what it should, before the "
        "server is ready: every entry, for a second or so (docs/self_test.md); hourly: and again once an "
        "hour, while there are no requests",
    )
    stall_timeout: float = Field(
        STALL_TIMEOUT_S,
        gt=0,
        description="seconds of one invocation after which the device is considered dead",
    )
    flight_recorder: bool = Field(
        True,
        description="keep the last minute's invocations, and dump them to a file when something fails, at "
        "SIGUSR1 and at POST /debug/dump; dumps hold token ids of users' requests (docs/flight_recorder.md)",
    )
    dump_dir: Path | None = Field(
        None,
        description="directory of the flight recorder's dumps (default: shortfin-llm-dumps-UID in the "
        "system's directory for temporary files)",
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

    @field_validator("kv_events_endpoint", "kv_events_replay_endpoint")
    @classmethod
    def _check_endpoint(cls, value: str | None) -> str | None:
        if value is not None and not is_endpoint(value):
            raise ValueError("it must be tcp://HOST:PORT, where * stands for every address, or ipc://PATH")
        return value

    @field_validator("batch_mode", mode="before")
    @classmethod
    def _dashes_or_underscores(cls, value: object) -> object:
        """Accept underscores, as upstream uses them in the names of modes."""
        return value.replace("_", "-") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_same_setting_twice(self) -> EngineSettings:
        if self.chunk_tokens is not None and self.chunk_block_size is not None:
            raise ValueError("give --chunk-tokens or --chunk-block-size, not both")
        return self
