"""Checks that rows adjusted on the device draw the same tokens as the host does from the same logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.gpu.engine import prompts
from bench.gpu.models import Model
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams

ENTRIES = "adjusted_sample"  # the entry family that adjusts rows
PROMPT_TOKENS = 128
MAX_TOKENS = 32


class Striped:
    """A grammar, and its own matcher, that allows half of the tokens, alternating the half."""

    param = "grammar"

    def __init__(self, vocab_size: int) -> None:
        self._num_bytes = -(-vocab_size // 8)

    def matcher(self) -> Striped:
        return self

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
        return (b"\xf0" if (len(generated) + len(ahead)) % 2 else b"\x33") * self._num_bytes

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        return ()


def kinds(vocab_size: int) -> list[dict[str, Any]]:
    """Return the sampling parameters of the requests."""
    grammar: Grammar = Striped(vocab_size)
    return [
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.3, "top_p": 0.9},
        {"repetition_penalty": 1.3, "min_p": 0.001},
        {"repetition_penalty": 0.8, "frequency_penalty": 0.7, "presence_penalty": 0.1},
        {"logit_bias": tuple((token_id, 0.37 * (token_id % 7 - 3)) for token_id in range(0, 200, 3))},
        {"allowed_token_ids": frozenset(range(0, vocab_size, 3))},
        {"output_grammar": grammar},
        {"output_grammar": grammar, "presence_penalty": -0.5, "top_p": 0.8},
    ]


def tokens_of(engine: Engine, model: Model, **params: Any) -> list[list[int]]:
    """Generate one request of each kind at temperature 1 in one batch; return tokens. Raises LlmError."""
    asked = kinds(model.spec.vocab_size)
    for index, prompt in enumerate(prompts(model.spec.vocab_size, len(asked), PROMPT_TOKENS)):
        options: dict[str, Any] = {**asked[index], **params, "seed": index, "max_tokens": MAX_TOKENS}
        sampling = SamplingParams(temperature=1.0, **options)
        engine.add(GenerateCall(request_id=str(index), prompt_token_ids=prompt, params=sampling))
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(asked))}
    while engine.has_work:
        for delta in engine.step():
            if delta.error is not None:
                raise delta.error
            tokens[delta.request_id] += delta.token_ids
    return list(tokens.values())


def num_adjusting(engine: Engine) -> int:
    """Return the number of invocations that adjusted rows on the device."""
    entries = engine.stats().entries
    return sum(count.invocations for name, count in entries.items() if name.startswith(ENTRIES))
