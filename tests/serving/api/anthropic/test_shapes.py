from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.api.anthropic.shapes import arguments_of, usage_of
from shortfin_apps.llm.serving.api.call_arguments import UNPARSED

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=4)


@given(OBJECTS)
def test_arguments_are_the_object_that_the_model_wrote(arguments: dict[str, object]) -> None:
    assert arguments_of(json.dumps(arguments)) == arguments


@given(OBJECTS, st.integers(1, 100))
def test_arguments_that_are_cut_have_names_of_the_whole(arguments: dict[str, object], length: int) -> None:
    cut = arguments_of(json.dumps(arguments)[:length])
    assert cut.keys() <= arguments.keys() | {UNPARSED}


@pytest.mark.parametrize("text", ["nonsense", "[1]", "7", '{"a" 1}'])
def test_other_arguments_are_handed_on_as_text(text: str) -> None:
    assert arguments_of(text) == {UNPARSED: text}


def test_no_arguments_are_an_empty_object() -> None:
    assert arguments_of("") == {}


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_the_parts_of_a_prompt_add_up(cached: int, more: int, output: int) -> None:
    usage = usage_of(cached + more, cached, output)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == cached + more
    assert usage["output_tokens"] == output
