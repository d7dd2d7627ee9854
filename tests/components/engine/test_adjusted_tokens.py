"""Penalties, biases and bans give the tokens of a reference over the model's logits, however they are run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.components.request.messages import GenerateCall
from tests.components.engine_fixture import PROMPT, call, make_rig
from tests.components.fake_device import fake_config, fake_logits
from tests.components.sampling.reference import adjusted

NUM_TOKENS = 14
KINDS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"repetition_penalty": 1.3},
    {"logit_bias": ((3, 4.0), (7, -100.0), (9, 3.5)), "frequency_penalty": 2.0},
    {"allowed_token_ids": frozenset(range(0, 32, 3)), "bad_words": ((3,), (6, 9), (0, 12, 15))},
    {"bad_words": tuple((i,) for i in range(0, 32, 2)), "repetition_penalty": 0.8},
    {"bad_words": ((5,), (6, 7))},
    {},
]
PLACES: dict[str, dict[str, Any]] = {
    "candidates": {},
    "logits alone": {"top_k": None},
    "decode loops": {"loop_sizes": (1, 2, 4, 8)},
    "a device that draws": {"loop_sizes": (1, 2, 4, 8), "sample_sizes": (1, 2, 4, 8)},
}


def calls() -> list[GenerateCall]:
    return [call(str(i), PROMPT[i:], NUM_TOKENS, **kind) for i, kind in enumerate(KINDS)]


def expected(wanted: GenerateCall) -> list[int]:
    prompt, output = list(wanted.prompt_token_ids), list[int]()
    for _ in range(NUM_TOKENS):
        row = adjusted(fake_logits(prompt + output), wanted.params, prompt, output)
        output.append(int(np.argmax(row)))
    return output


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize("pages", [64, 24])
@pytest.mark.parametrize("place", PLACES)
def test_tokens_are_those_of_the_reference(place: str, pages: int, mode: str) -> None:
    """With few pages, requests are preempted."""
    options = dict(PLACES[place])
    config = fake_config(pages=pages, top_k=options.pop("top_k", 4))
    rig = make_rig(config, mode=mode, **options)
    for wanted in calls():
        rig.engine.check(wanted)
        rig.engine.add(wanted)
    rig.run()
    assert (rig.scheduler.num_preemptions > 0) is (pages == 24)
    assert rig.outputs == {wanted.request_id: expected(wanted) for wanted in calls()}


def test_the_prompt_of_several_choices_is_computed_once() -> None:
    """All but the last, partial page, which each has for itself."""
    config = fake_config(pages=64)
    rig = make_rig(config)
    for choice in range(6):
        rig.engine.add(call(str(choice), PROMPT, 3, temperature=1.0, seed=choice))
    rig.run()
    shared = (len(PROMPT) - 1) // config.stride * config.stride
    assert rig.engine.stats().prompt_tokens == shared + 6 * (len(PROMPT) - shared)
