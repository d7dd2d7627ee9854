"""Checks that a device chooses the same tokens as the CPU, with tiny models in f32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.gpu.engine import prompts
from bench.gpu.models import Model

EXPECTED = "tokens.json"  # in the folder of a packed model
PROMPTS = 20
PROMPT_TOKENS = 128
MAX_TOKENS = 64


def make_prompts(model: Model) -> list[tuple[int, ...]]:
    return prompts(model.spec.vocab_size, PROMPTS, PROMPT_TOKENS)


def scarce_pages(model: Model) -> int:
    """Return enough pages for all prompts but not for all tokens, so that requests are preempted."""
    stride = model.options.block_seq_stride
    return 1 + PROMPTS * (-(-PROMPT_TOKENS // stride) + 1)


def compare(tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return for each prompt the number of tokens before the first difference."""
    agreed = [
        next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), len(want))
        for got, want in zip(tokens, expected, strict=True)
    ]
    return {"agreed": agreed, "of": len(expected[0]), "equal": min(agreed) == len(expected[0])}
