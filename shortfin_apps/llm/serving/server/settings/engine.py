"""Server settings: device, batching, KV cache and speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode

from shortfin_apps.llm.components.batching.mode import BatchModeName
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

    batch_mode: BatchModeName = Field(
        "auto",
        description="default (prefill and decode alternate), extend-attention (both in one invocation) or "
        "auto: extend-attention on GPUs, else default",
    )
    chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of a prefill chunk, rounded up to pages (default: 128, or more where the budget "
        "has room; if given without a budget, chunks in the default mode are never longer)",
    )
    token_budget: int | None = Field(
        None,
        ge=1,
        description="maximum tokens of an invocation, in the default mode of a prefill (default: measured at "
        "the start, of 320 at most on CPUs, 512 or more on GPUs, and 512 or 2048 while no request decodes)",
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
    dump_dir: Literal["off"] | Path | None = Field(
        None,
        description="directory in which the flight recorder dumps the last minute's invocations when "
        "something fails, at SIGUSR1 and at POST /debug/dump, with token ids of users' requests; off: record "
        "nothing (default: shortfin-llm-dumps-UID in the system's directory for temporary files)",
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
