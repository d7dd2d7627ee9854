"""Batching modes by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shortfin_apps.llm.components.batching.mode import BatchMode
from shortfin_apps.llm.components.batching.modes.default import DefaultMode
from shortfin_apps.llm.components.batching.modes.extend_attention import ExtendAttentionMode
from shortfin_apps.llm.components.batching.prefill_chunks import BudgetedChunks, FixedChunks
from shortfin_apps.llm.components.batching.token_budget import TokenBudget
from shortfin_apps.llm.config import ModelConfig
from shortfin_apps.llm.errors import ArtifactError

DEFAULT_CHUNK_TOKENS = 128
# By tests/components/batching/test_policy.py: with full batches of such chunks, running streams would wait
# half as long again beside many prompts in the default mode, and twice as long as in the other; and no more
# is lost to the steps being many. In the other, 192 was measured to give W3 a tenth less, at equal waits.
DEFAULT_PREFILL_BUDGET = 320
DEFAULT_EXTEND_BUDGET = 256
# With nobody waiting for a next token: longer chunks are no quicker any more (bench/README.md).
DEFAULT_IDLE_BUDGET = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """What a mode may be told. Token counts are rounded up to whole pages; None leaves it to the mode.

    `chunk_tokens` is the prefill chunk length, `token_budget` the most tokens in one invocation (in the
    default mode, of prefill) and `idle_budget` the same while nobody decodes, by default a `token_budget`
    that was given; `prefills_per_decode` is how the default mode shares the device between the two.
    """

    chunk_tokens: int | None = None
    token_budget: int | None = None
    idle_budget: int | None = None
    prefills_per_decode: int = 1


@dataclass(frozen=True, slots=True)
class ModeKind:
    """How a mode is made, how many requests it runs at once by default, and what the VMFB must have.

    `make` is also told whether the VMFB takes chunks of any length.
    """

    make: Callable[[ModelConfig, BatchOptions, bool], BatchMode]
    default_max_running: Callable[[ModelConfig], int]
    needs_extend_entries: bool = False


def _default(config: ModelConfig, options: BatchOptions, any_chunk: bool) -> BatchMode:
    return DefaultMode(
        chunks=_chunks(config, options, any_chunk),
        max_decode_batch=max(config.decode_batch_sizes),
        prefills_per_decode=options.prefills_per_decode,
    )


def _chunks(config: ModelConfig, options: BatchOptions, any_chunk: bool) -> FixedChunks:
    """Whole prompts where the model can do no other; chunks of one size where that is asked for, as of
    upstream's servers, or where only such were compiled."""
    rows = config.prefill_batch_sizes
    if not config.has_prefill_position:
        if options.chunk_tokens is not None:
            raise ArtifactError(
                "a chunk length was given, but this model takes whole prompts only (`has_prefill_position` "
                "is false in its config.json); leave out `--chunk-block-size`, or export it with that option"
            )
        return FixedChunks(stride=config.stride, chunk_tokens=None, row_buckets=rows)
    chunk = _whole_pages(options.chunk_tokens or DEFAULT_CHUNK_TOKENS, config)
    has_budget = options.token_budget is not None or options.idle_budget is not None
    if not any_chunk or (options.chunk_tokens is not None and not has_budget):
        return FixedChunks(stride=config.stride, chunk_tokens=chunk, row_buckets=rows)
    budget = _budget(config, options, DEFAULT_PREFILL_BUDGET)
    return BudgetedChunks(stride=config.stride, chunk_tokens=chunk, row_buckets=rows, budget=budget)


def _extend_attention(config: ModelConfig, options: BatchOptions, any_chunk: bool) -> BatchMode:
    del any_chunk  # the entries that the mode needs do
    least = 2 * config.stride
    for budget in (options.token_budget, options.idle_budget):
        if budget is not None and _whole_pages(budget, config) < least:
            raise ArtifactError(
                f"a token budget of {budget} has no room for a decode beside a page of prefill, as "
                f"this model's pages hold {config.stride} tokens; give `--token-budget {least}` or more, "
                "`--max-pages-per-batch 2` or more, or neither"
            )
    return ExtendAttentionMode(
        stride=config.stride,
        chunk_tokens=_whole_pages(options.chunk_tokens or DEFAULT_CHUNK_TOKENS, config),
        budget=_budget(config, options, max(DEFAULT_EXTEND_BUDGET, least)),
    )


def _budget(config: ModelConfig, options: BatchOptions, while_decoding: int) -> TokenBudget:
    """What was asked for, and otherwise `while_decoding` beside streams."""
    alone = options.idle_budget or options.token_budget or max(DEFAULT_IDLE_BUDGET, while_decoding)
    return TokenBudget(
        while_decoding=_whole_pages(options.token_budget or while_decoding, config),
        alone=_whole_pages(alone, config),
        context_span=_context_span(config),
    )


def _context_span(config: ModelConfig) -> int:
    """The context whose attention takes a token about as long as the rest of the model.

    With a hidden size of h, a layer's matmuls are about 24 h^2 FLOPs a token and its attention 4 h a key, so
    the two meet at 6 h keys. The config does not say h; the width of K, which it says, is h or, with
    grouped queries, a part of it: that leaves room for attention running further from the peak.
    """
    return 6 * config.paged_kv_cache.attention_head_count_kv * config.attn_head_dim


def _whole_pages(tokens: int, config: ModelConfig) -> int:
    return -(-tokens // config.stride) * config.stride


BATCH_MODES: dict[str, ModeKind] = {
    "default": ModeKind(_default, lambda config: max(config.decode_batch_sizes)),
    "extend-attention": ModeKind(_extend_attention, lambda config: 256, needs_extend_entries=True),
}


def make_mode(name: str, config: ModelConfig, options: BatchOptions, *, any_chunk: bool = True) -> BatchMode:
    """`any_chunk` tells whether the VMFB's prefill entries take any length. Raises ArtifactError."""
    return BATCH_MODES[name].make(config, options, any_chunk)
