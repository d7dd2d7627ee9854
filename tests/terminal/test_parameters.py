from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.client import Sampling
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.terminal.parameters import changed, shown


def test_parameters_are_set_and_left_to_the_server() -> None:
    sampling = changed({"seed": 7, "top_k": 3}, "temperature=1 min-p=0.5 top_k= seed=8 ignore_eos=true")
    assert sampling == {"seed": 8, "temperature": 1.0, "min_p": 0.5, "ignore_eos": True}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("stop=END", "END"),
        ("stop='two words'", "two words"),
        ("stop='\"\\n\"'", "\n"),
        ('stop=\'["a", "b"]\'', ["a", "b"]),
        ("cache_salt=12", "12"),
        ("stop=[", "["),
        ("logit_bias='{\"5\": -1}'", {"5": -1}),
        ("stop_token_ids=[1,2]", [1, 2]),
    ],
)
def test_values_are_json_or_text(text: str, value: object) -> None:
    assert list(changed({}, text).values()) == [value]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("temperature", "'temperature' has no value"),
        ("heat=1", "there is no parameter heat; there are max_tokens, "),
        ("temperature=warm", "temperature cannot be 'warm': Input should be a valid number"),
        ("temperature=true", "temperature cannot be"),
        ("temperature=NaN", "temperature cannot be"),
        ("max_tokens=1.5", "max_tokens cannot be '1.5'"),
        ("max_tokens=true", "max_tokens cannot be"),
        ("ignore_eos=1", "ignore_eos cannot be"),
        ("stop_token_ids='[\"a\"]'", "stop_token_ids cannot be"),
        ("stop='a", "open quotation"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_changes(text: str, reason: str) -> None:
    sampling: Sampling = {"seed": 7}
    with pytest.raises(InvalidRequestError, match=reason.replace("(", r"\(")):
        changed(sampling, f"seed=8 {text}")
    assert sampling == {"seed": 7}


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 2),
            "seed": st.integers(),
            "stop": st.lists(st.text(), max_size=3) | st.text(),
            "cache_salt": st.text(),
            "ignore_eos": st.booleans(),
        },
    )
)
def test_what_is_shown_sets_the_same(sampling: Sampling) -> None:
    assert changed({}, shown(sampling) if sampling else "") == sampling
