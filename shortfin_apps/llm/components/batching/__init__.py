"""Batching modes by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shortfin_apps.llm.components.batching.mode import BatchMode
from shortfin_apps.llm.components.batching.modes.default import DefaultMode
from shortfin_apps.llm.config import ModelConfig
from shortfin_apps.llm.errors import UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """`chunk_tokens` is the prefill chunk length; None leaves it to the mode."""

    chunk_tokens: int | None = None
    prefills_per_decode: int = 1


DEFAULT_CHUNK_TOKENS = 128


def _default(config: ModelConfig, options: BatchOptions) -> BatchMode:
    chunk = None
    if config.has_prefill_position:
        tokens = options.chunk_tokens or DEFAULT_CHUNK_TOKENS
        chunk = -(-tokens // config.stride) * config.stride
    return DefaultMode(
        stride=config.stride,
        chunk_tokens=chunk,
        max_prefill_batch=max(config.prefill_batch_sizes),
        max_decode_batch=max(config.decode_batch_sizes),
        prefills_per_decode=options.prefills_per_decode,
    )


def _extend_attention(config: ModelConfig, options: BatchOptions) -> BatchMode:
    raise UnavailableError("batch mode extend-attention is not built yet; use default")


BATCH_MODES: dict[str, Callable[[ModelConfig, BatchOptions], BatchMode]] = {
    "default": _default,
    "extend-attention": _extend_attention,
}


def make_mode(name: str, config: ModelConfig, options: BatchOptions) -> BatchMode:
    return BATCH_MODES[name](config, options)
