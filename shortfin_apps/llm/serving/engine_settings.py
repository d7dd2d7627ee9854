"""Settings of an engine: device, memory, requests in progress, speculation and checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.kv_events.options import KVEventSettings
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.runtime.open import Runtime, is_gpu
from shortfin_apps.llm.components.speculation.options import DEFAULT_MAX_TOKENS
from shortfin_apps.llm.contract.host_cpu import MAX_CPU_WORKERS
from shortfin_apps.llm.serving.frontend.async_engine import MAX_QUEUE_TOKENS, STALL_TIMEOUT_S
from shortfin_apps.llm.setting import setting

GPU_MAX_QUEUE_TOKENS = 8 * MAX_QUEUE_TOKENS  # half a minute of prefills of an 8B on an H200

Speculative = Literal["off", "ngram", "mtp"]
SelfTestTime = Literal["off", "start", "hourly"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How to serve a model. Where a setting is None, the artefact or the machine determines the value."""

    runtime: Runtime = setting("auto", "runtime that executes the VMFB")
    device: str = setting(
        "cpu",
        "cpu, hip (AMD GPUs), cuda (NVIDIA GPUs) or auto (what the machine has; default of artefacts); "
        "for a source as in `build`",
        common=True,
    )
    device_ids: tuple[str, ...] = setting(
        (), "GPUs to use, one per pipeline stage: indices or names", common=True
    )
    threads: int | None = setting(
        None,
        f"CPU workers (default: all CPUs, at most {MAX_CPU_WORKERS})",
        common=True,
        ge=1,
        le=MAX_CPU_WORKERS,
    )
    batching: BatchSettings = field(default_factory=BatchSettings)
    max_running: int | None = setting(
        None,
        "maximum requests in progress (default: the largest decode batch, in extend-attention on GPUs 256)",
        common=True,
        ge=1,
    )
    max_queue: int = setting(256, "maximum waiting requests; further ones get 429", common=True, ge=1)
    max_queue_tokens: int | None = setting(
        None,
        "most prompt tokens of requests without a first token; further requests are answered 429 (default: "
        f"{MAX_QUEUE_TOKENS:,}, and {GPU_MAX_QUEUE_TOKENS:,} on GPUs)",
        ge=1,
    )
    pages: Annotated[int, Field(ge=2)] | Literal["auto"] | None = setting(
        None,
        "pages of the KV cache, or auto: all free memory (default: as given to `build`, else auto on GPUs, "
        "and on CPUs 8 full contexts, at most 1 GiB)",
        common=True,
    )
    prefix_cache: PrefixCache = setting(
        "trie", "how requests share the pages of a common prefix", common=True
    )
    kv_events: KVEventSettings = field(default_factory=KVEventSettings)
    pipeline_depth: int | None = setting(
        None,
        "steps queued on the device before the tokens of the running one are known; 0 plans each step after "
        "the one before (default: 1 if the model has decode loops, see `build --decode-loop-sizes`, else 0)",
        ge=0,
        le=2,
    )
    static_threshold: int | None = setting(
        None,
        "largest static entry to use, in tokens; larger batches run on dynamic entries, and with 0 all do "
        "(default: every static entry)",
        ge=0,
    )
    speculative: Speculative = setting(
        "off",
        "speculate by prompt lookup (ngram), or with the model's own draft layer (mtp); the tokens stay the "
        "same",
        common=True,
    )
    speculative_model: Path | None = setting(
        None,
        "a smaller model with the same tokenizer that drafts tokens, or an EAGLE-3 head that is built into "
        "MODEL, named as MODEL is; the tokens stay the same",
        common=True,
    )
    speculative_tokens: int = setting(
        DEFAULT_MAX_TOKENS,
        "most tokens proposed for a request at once; fewer where they are seldom right",
        ge=1,
        le=64,
    )
    self_test: SelfTestTime = setting(
        "start",
        "compare what the model computes for a few prompts with what it should, before the server is ready: "
        "every entry, for a second or so (docs/self_test.md); hourly: and again once an hour, while there "
        "are no requests",
    )
    stall_timeout: float = setting(
        STALL_TIMEOUT_S,
        "seconds of one invocation after which requests get 503; after twice as many the device is lost,"
        " and the server ends with status 75",
        gt=0,
    )
    dump_dir: Literal["off"] | Path | None = setting(
        None,
        "directory in which the flight recorder dumps the last minute's invocations when something fails, at "
        "SIGUSR1 and at POST /debug/dump, with token ids of users' requests; off: record nothing (default: "
        "shortfin-llm-dumps-UID in the system's directory for temporary files)",
    )

    @property
    def is_on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return is_gpu(self.device)

    @property
    def queued_tokens(self) -> int:
        """The maximum prompt tokens of requests without a first token."""
        default = GPU_MAX_QUEUE_TOKENS if self.is_on_gpu else MAX_QUEUE_TOKENS
        return self.max_queue_tokens or default

    @property
    def driver(self) -> str:
        """The device without the chip of a GPU, as `open_device` takes it."""
        return self.device.partition(":")[0] if self.is_on_gpu else self.device
