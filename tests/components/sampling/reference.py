"""Penalties, biases and bans over a dense row, one token of the vocabulary at a time, in f32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.request.sampling_params import SamplingParams

F32 = np.float32


def adjusted(
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    ends: frozenset[int] = frozenset(),
) -> npt.NDArray[np.float32]:
    """The logits [V] of the next token after `prompt` and `output`; banned tokens have minus infinity."""
    return np.array(
        [
            -np.inf if _is_banned(i, params, output, ends) else _penalised(i, value, params, prompt, output)
            for i, value in enumerate(logits)
        ],
        F32,
    )


def _is_banned(token_id: int, params: SamplingParams, output: Sequence[int], ends: frozenset[int]) -> bool:
    if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
        return True
    if len(output) < params.min_tokens and token_id in ends | params.stop_token_ids:
        return True
    text = (*output, token_id)
    return any(text[-len(word) :] == word for word in params.bad_words)


def _penalised(
    token_id: int, value: F32, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> F32:
    for biased, bias in params.logit_bias:
        value = value + F32(bias) if biased == token_id else value
    if token_id in prompt or token_id in output:
        factor = F32(params.repetition_penalty)
        value = value / factor if value > 0 else value * factor
    count = list(output).count(token_id)
    value = value - F32(params.frequency_penalty) * F32(count)
    return value - F32(params.presence_penalty) if count else value
