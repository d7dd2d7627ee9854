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
DEFAULT_TOKEN_BUDGET = 256


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
    budget = _whole_pages(options.token_budget or DEFAULT_TOKEN_BUDGET, config)
    return ExtendAttentionMode(
        stride=config.stride,
        chunk_tokens=_whole_pages(options.chunk_tokens or DEFAULT_CHUNK_TOKENS, config),
        token_budget=max(budget, 2 * config.stride),
    )


def _whole_pages(tokens: int, config: ModelConfig) -> int:
    return -(-tokens // config.stride) * config.stride


BATCH_MODES: dict[str, ModeKind] = {
    "default": ModeKind(_default, lambda config: max(config.decode_batch_sizes)),
    "extend-attention": ModeKind(_extend_attention, lambda config: 256, needs_extend_entries=True),
}


def make_mode(name: str, config: ModelConfig, options: BatchOptions) -> BatchMode:
    return BATCH_MODES[name].make(config, options)
