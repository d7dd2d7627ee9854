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
# A GPU takes about as long for 64 tokens as for 320, and needs many more to be busy.
GPU_BUDGET = 512
GPU_IDLE_BUDGET = 2048


BatchModeName = Literal["auto", "default", "extend-attention"]


def weights_of(value: object) -> dict[str, float]:
    """Read weights from NAME=WEIGHT, several, or a mapping. Raises ValueError."""
    if isinstance(value, Mapping):
        value = [f"{name}={weight}" for name, weight in value.items()]
    if isinstance(value, str):
        value = [part for part in value.split(",") if part]
    weights = {}
    for entry in value if isinstance(value, list | tuple) else [value]:
        name, _, weight = str(entry).rpartition("=")
        is_number = re.fullmatch(r"\d+(\.\d+)?", weight) is not None
        # Outside this range, one tenant's service is lost in the rounding error of another's.
        if not name or not is_number or not 0.001 <= float(weight) <= 1000:
            raise ValueError(f"{entry!r} must be a tenant's name, `=` and a number from 0.001 to 1000")
        weights[name] = float(weight)
    return weights


class CompiledEntries(Protocol):
    """Properties of a VMFB's entries that a mode depends on."""

    @property
    def has_extend(self) -> bool:
        """Whether a batch of any size can run on an `extend` entry."""

    @property
    def takes_any_chunk(self) -> bool:
        """Whether a prefill of any length runs without padding, for every number of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """How invocations are filled; None leaves the choice to the mode.

    Token counts are rounded up to full pages. `chunk_tokens` is the length of a prefill chunk, `token_budget`
    the maximum tokens in one invocation (in the default mode, in a prefill). Without a `token_budget`, the
    budgets are larger on GPUs and while no request decodes, and `Engine.tune` may measure them.
    """

    batch_mode: BatchModeName = setting(
        "auto",
        "default (prefill and decode alternate), extend-attention (both in one invocation) or auto: "
        "extend-attention on GPUs, else default",
        common=True,
        read=lambda value: value.replace("_", "-") if isinstance(value, str) else value,  # as upstream's
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
        """Tokens of a chunk, in full pages."""
        return whole_pages(self.chunk_tokens or DEFAULT_CHUNK_TOKENS, config)

    def budget(self, config: ModelConfig, while_decoding: int, *, on_gpu: bool) -> TokenBudget:
        """The token budget; on CPUs, `while_decoding` is the default while requests decode."""
        while_decoding = max(GPU_BUDGET, while_decoding) if on_gpu else while_decoding
        idle = max(GPU_IDLE_BUDGET if on_gpu else DEFAULT_IDLE_BUDGET, while_decoding)
        return TokenBudget(
            while_decoding=whole_pages(self.token_budget or while_decoding, config),
            idle=whole_pages(self.token_budget or idle, config),
            context_span=_context_span(config),
        )


class BatchMode(ABC):
    """A policy that decides which parts of which requests the next invocation computes.

    It owns no request and no page.
    """

    # Whether prompts and decodes share an invocation. In other modes, larger budgets were not faster on GPUs.
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
    def default_max_running(config: ModelConfig) -> int:
        """Default number of requests in progress at once."""

    @property
    @abstractmethod
    def max_task_tokens(self) -> int | None:
        """Maximum tokens of one request in an invocation; None if that may be a full prompt."""

    def tokens_ahead(self, stride: int) -> int | None:
        """Number of tokens, from a request's first uncomputed one, that window pages are reserved for.

        Covers the tokens that an invocation may compute, and for decodes the steps queued ahead; None for
        all.
        """
        most = self.max_task_tokens
        return None if most is None else max(most, 2 * stride)

    @abstractmethod
    def spare_tokens(self, batch: Batch) -> int:
        """Tokens of the budget left after a batch with decodes; may be negative."""

    @abstractmethod
    def next_batch(self, running: Sequence[Request]) -> Batch | None:
        """Return the next invocation, or None when there is nothing to compute.

        `running` is ordered by admission; every request in it has at least one token to compute and pages for
        all its tokens. A task must not depend on another task of the same batch.
        """


def whole_pages(tokens: int, config: ModelConfig) -> int:
    """`tokens` rounded up to a multiple of the page size."""
    return -(-tokens // config.stride) * config.stride


def _context_span(config: ModelConfig) -> int:
    """The context length at which a token's attention takes about as long as the rest of the model.

    With a hidden size of h, a layer's matmuls take about 24 h^2 FLOPs per token and its attention 4 h per
    key, so the two are equal at 6 h keys. The config does not contain h; it contains the width of K, which is
    h or, with grouped queries, a fraction of it. That leaves a margin, as attention runs further from peak
    FLOPs.
    """
    return 6 * config.paged_kv_cache.attention_head_count_kv * config.attn_head_dim
