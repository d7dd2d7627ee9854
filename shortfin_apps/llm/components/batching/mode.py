"""The settings of batching, and the interface of a batching mode."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, Self

from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.components.batching.token_budget import TokenBudget
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.setting import setting

DEFAULT_CHUNK_TOKENS = 128
# Budget while nothing decodes: longer chunks were not measurably faster on CPUs (docs/measurements.md).
DEFAULT_IDLE_BUDGET = 512
# A GPU computes 320 tokens in about the time of 64, and needs many more to be busy.
GPU_BUDGET = 512
GPU_IDLE_BUDGET = 2048


BatchModeName = Literal["auto", "default", "extend-attention"]


def weights_of(value: object) -> dict[str, float]:
    """Parse tenant weights. Raises ValueError.

    `value` is a mapping, a list of `NAME=WEIGHT` strings, or such strings joined by commas.
    """
    if isinstance(value, Mapping):
        value = [f"{name}={weight}" for name, weight in value.items()]
    if isinstance(value, str):
        value = [part for part in value.split(",") if part]
    weights = {}
    for entry in value if isinstance(value, list | tuple) else [value]:
        name, _, weight = str(entry).rpartition("=")
        is_number = re.fullmatch(r"\d+(\.\d+)?", weight) is not None
        # Beyond these limits, adding service to one tenant's counter is lost in rounding beside another's.
        if not name or not is_number or not 0.001 <= float(weight) <= 1000:
            raise ValueError(f"{entry!r} must be a tenant's name, `=` and a number from 0.001 to 1000")
        weights[name] = float(weight)
    return weights


class CompiledEntries(Protocol):
    """Properties of a VMFB's entries that a mode depends on."""

    @property
    def has_extend(self) -> bool:
        """Whether the VMFB has an `extend` entry that takes batches of any size."""

    @property
    def has_packed_extend(self) -> bool:
        """Whether that entry takes tasks of one token at any position, even several of one request."""

    @property
    def takes_followers(self) -> bool:
        """Whether it takes several of one request in layers with a state, too."""

    @property
    def takes_any_chunk(self) -> bool:
        """Whether a prefill of any length runs without padding, for every number of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Settings that determine which tokens an invocation computes; None: the mode chooses the value.

    Token counts are rounded up to full pages. `chunk_tokens` is the length of a prefill chunk, `token_budget`
    the maximum tokens of one invocation (in the default mode: of one prefill). Without a `token_budget`, the
    mode's budgets are larger on GPUs and while no request decodes, and `Engine.tune` may replace these
    budgets by measured ones.
    """

    batch_mode: BatchModeName = setting(
        "auto",
        "default (prefill and decode alternate), extend-attention (both in one invocation) or auto: "
        "extend-attention if the model has the entries, as `build` adds them",
        common=True,
        read=lambda value: value.replace("_", "-") if isinstance(value, str) else value,  # upstream uses `_`
    )
    chunk_tokens: int | None = setting(
        None,
        "tokens of a prefill chunk, rounded up to pages (default: 128, or more where the budget has room; if "
        "given without a budget, chunks in the default mode are never longer)",
        ge=1,
    )
    token_budget: int | None = setting(
        None,
        "maximum tokens of an invocation, in the default mode of a prefill (default: measured at the start, "
        "of 320 at most on CPUs, 512 or more on GPUs, and 512 or 2048 while no request decodes)",
        common=True,
        ge=1,
    )
    tenant_weights: Mapping[str, float] = setting(
        dict,
        "tenants' shares of the service, as NAME=WEIGHT; others have weight 1",
        read=weights_of,
    )

    def chunk(self, config: ModelConfig) -> int:
        """Return the length of a prefill chunk in tokens, rounded up to full pages."""
        return whole_pages(self.chunk_tokens or DEFAULT_CHUNK_TOKENS, config)

    def budget(self, config: ModelConfig, while_decoding: int, *, on_gpu: bool) -> TokenBudget:
        """Create the token budget.

        `while_decoding` is the default budget while requests decode; on GPUs, GPU_BUDGET if that is larger.
        """
        while_decoding = max(GPU_BUDGET, while_decoding) if on_gpu else while_decoding
        idle = max(GPU_IDLE_BUDGET if on_gpu else DEFAULT_IDLE_BUDGET, while_decoding)
        return TokenBudget(
            while_decoding=whole_pages(self.token_budget or while_decoding, config),
            idle=whole_pages(self.token_budget or idle, config),
            context_span=_context_span(config),
        )


class BatchMode(ABC):
    """A policy that selects which tokens of which requests the next invocation computes.

    A mode owns neither requests nor pages.
    """

    # Whether prompts and decodes share an invocation. Only then does `Engine.tune` raise budgets on GPUs: in
    # other modes, larger budgets were not faster.
    mixes: ClassVar[bool] = False
    budget: TokenBudget | None  # None if chunks have a fixed size

    @classmethod
    @abstractmethod
    def make(
        cls, settings: BatchSettings, config: ModelConfig, entries: CompiledEntries, *, on_gpu: bool = False
    ) -> Self:
        """Create the mode. Raises ArtifactError if the model or the settings do not allow it."""

    @staticmethod
    @abstractmethod
    def default_max_running(config: ModelConfig, *, on_gpu: bool) -> int:
        """Return the default maximum number of running requests."""

    @property
    @abstractmethod
    def max_task_tokens(self) -> int | None:
        """Maximum tokens of one task; None if a task may be a full prompt."""

    def tokens_ahead(self, stride: int) -> int | None:
        """Return the number of tokens, from a request's first uncomputed one, to reserve window pages for.

        This covers the tokens of one invocation and, for decodes, steps queued ahead. None: all tokens.
        """
        most = self.max_task_tokens
        return None if most is None else max(most, 2 * stride)

    @abstractmethod
    def spare_tokens(self, batch: Batch) -> int:
        """Return how many tokens of the budget `batch`, which has decodes, leaves unused; may be negative."""

    @abstractmethod
    def next_batch(self, running: Sequence[Request]) -> Batch | None:
        """Return the next invocation, or None when there is nothing to compute.

        Callers must order `running` by admission, oldest first; each request must have at least one unplanned
        token, and pages for all its tokens. Modes must not return a task that depends on another task of
        the same batch, except on earlier decodes of its request in a packed `extend` (`decode_tasks`).
        """


def takes_several_decodes(config: ModelConfig, entries: CompiledEntries) -> bool:
    """Return whether one batch can have several decodes of a request, at consecutive positions."""
    return entries.has_packed_extend and ("state" not in config.pools or entries.takes_followers)


def whole_pages(tokens: int, config: ModelConfig) -> int:
    """Round `tokens` up to a multiple of the page size."""
    return -(-tokens // config.stride) * config.stride


def _context_span(config: ModelConfig) -> int:
    """Estimate the context length at which attention takes as long per token as the rest of the model.

    With hidden size h, a layer's matmuls take about 24 h^2 FLOPs per token, and attention takes 4 h FLOPs per
    key. These are equal at 6 h keys. The config has the width of K in place of h: h itself or, with
    grouped-query attention, a fraction of h. Underestimating the length leaves a margin, because attention
    runs further from peak FLOPs than matmuls.
    """
    return 6 * config.paged_kv_cache.attention_head_count_kv * config.attn_head_dim
