from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.api.limits import JsonCounts, counts_of, most_counts_of

TEXTS = st.text(st.sampled_from('"\\[]{}:,au\n\u2028é'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> JsonCounts:
    """The counts of a value, by walking it."""
    if isinstance(value, dict):
        inner = list(map(counted, value.values()))
        return JsonCounts(1 + sum(c for c, _ in inner), len(value) + sum(n for _, n in inner))
    if isinstance(value, list):
        inner = list(map(counted, value))
        return JsonCounts(1 + sum(c for c, _ in inner), sum(n for _, n in inner))
    return JsonCounts(0, 0)


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_the_counts_are_those_of_the_parsed_value(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert counts_of(text) == counted(value)
    most = most_counts_of(text)
    assert most.containers >= counted(value).containers
    assert most.names >= counted(value).names


@given(VALUES, st.binary(max_size=6))
def test_an_error_in_the_text_hides_nothing_before_it(value: Any, rubbish: bytes) -> None:
    counts = counts_of(json.dumps(value).encode() + b" \x00" + rubbish)
    assert counts.containers >= counted(value).containers
    assert counts.names >= counted(value).names


@pytest.mark.parametrize("text", [b"", b'"', b'"\\', b'[[[["', b'{"a": "b'])
def test_what_is_cut_is_counted_as_far_as_it_goes(text: bytes) -> None:
    assert counts_of(text).containers == text.partition(b'"')[0].count(b"[") + text.count(b"{")
