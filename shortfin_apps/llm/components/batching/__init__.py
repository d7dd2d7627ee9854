"""Batching modes by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shortfin_apps.llm.components.batching.mode import BatchMode
from shortfin_apps.llm.components.batching.modes.default import DefaultMode
from shortfin_apps.llm.components.batching.modes.extend_attention import ExtendAttentionMode
from shortfin_apps.llm.config import ModelConfig
from shortfin_apps.llm.errors import ArtifactError

DEFAULT_CHUNK_TOKENS = 128
# By tests/components/batching/test_policy.py: beside many prompts, running streams wait less than a third as
# long as in the default mode, and no more is lost to the steps being many.
DEFAULT_TOKEN_BUDGET = 192


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """What a mode may be told. Token counts are rounded up to whole pages.

    `chunk_tokens` is the prefill chunk length; `token_budget` the most tokens in one extend invocation;
    `prefills_per_decode` is how the default mode shares the device between the two.
    """

    chunk_tokens: int | None = None
    token_budget: int | None = None
    prefills_per_decode: int = 1


@dataclass(frozen=True, slots=True)
class ModeKind:
    """How a mode is made, how many requests it runs at once by default, and what the VMFB must have."""

    make: Callable[[ModelConfig, BatchOptions], BatchMode]
    default_max_running: Callable[[ModelConfig], int]
    needs_extend_entries: bool = False


def _default(config: ModelConfig, options: BatchOptions) -> BatchMode:
    chunk = None
    if config.has_prefill_position:
        chunk = _whole_pages(options.chunk_tokens or DEFAULT_CHUNK_TOKENS, config)
    elif options.chunk_tokens is not None:
        raise ArtifactError(
            "a chunk length was given, but this model takes whole prompts only (`has_prefill_position` is "
            "false in its config.json); leave out `--chunk-block-size`, or export it with that option"
        )
    return DefaultMode(
        stride=config.stride,
        chunk_tokens=chunk,
        max_prefill_batch=max(config.prefill_batch_sizes),
        max_decode_batch=max(config.decode_batch_sizes),
        prefills_per_decode=options.prefills_per_decode,
    )


def _extend_attention(config: ModelConfig, options: BatchOptions) -> BatchMode:
    return ExtendAttentionMode(
        stride=config.stride,
        chunk_tokens=_whole_pages(options.chunk_tokens or DEFAULT_CHUNK_TOKENS, config),
        token_budget=_token_budget(config, options),
        context_span=_context_span(config),
    )


def _token_budget(config: ModelConfig, options: BatchOptions) -> int:
    least = 2 * config.stride
    if options.token_budget is None:
        return max(_whole_pages(DEFAULT_TOKEN_BUDGET, config), least)
    budget = _whole_pages(options.token_budget, config)
    if budget < least:
        raise ArtifactError(
            f"a token budget of {options.token_budget} has no room for a decode beside a page of prefill, as "
            f"this model's pages hold {config.stride} tokens; give `--token-budget {least}` or more, "
            "`--max-pages-per-batch 2` or more, or neither"
        )
    return budget


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


def make_mode(name: str, config: ModelConfig, options: BatchOptions) -> BatchMode:
    return BATCH_MODES[name].make(config, options)
