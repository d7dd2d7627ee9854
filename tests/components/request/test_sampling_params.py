from __future__ import annotations

import numpy as np
import pytest

from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.errors import InvalidRequestError


def test_below_the_normal_numbers_of_f32_a_temperature_is_greedy() -> None:
    smallest_normal = float(np.finfo(np.float32).tiny)
    assert SamplingParams(max_tokens=1, temperature=float(np.nextafter(smallest_normal, 0))).greedy
    assert not SamplingParams(max_tokens=1, temperature=smallest_normal).greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", 9),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 2.0),
        ("seed", -1),
        ("logprobs", 21),
        ("presence_penalty", 2.01),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("logit_bias", ((1, float("nan")),)),
        ("logit_bias", ((1, 10**400),)),
        ("logit_bias", ((1, 0.0),) * 1025),
        ("bad_words", ((),)),
        ("bad_words", ((1,),) * 1025),
        ("allowed_token_ids", frozenset()),
        ("typical_p", 0.0),
    ],
)
def test_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field) as raised:
        SamplingParams(**{"max_tokens": 4, field: value})  # type: ignore[arg-type]
    assert raised.value.param == field
