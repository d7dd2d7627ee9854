from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.receipts.encoding import canonical_json, digest, from_text, to_text

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=9,
)


@given(VALUES)
def test_canonical_json_survives_a_way_through_json(value: Any) -> None:
    written = canonical_json(value)
    assert canonical_json(json.loads(written)) == written
    assert json.loads(written) == value


@given(st.dictionaries(st.text(), st.integers()))
def test_the_order_of_keys_is_nothing(value: dict[str, int]) -> None:
    assert canonical_json(dict(reversed(value.items()))) == canonical_json(value)


def test_whole_floats_are_integers() -> None:
    assert canonical_json({"b": [1.0, 0.5, -0.0], "a": 2**53}) == b'{"a":9007199254740992,"b":[1,0.5,0]}'


def test_nothing_that_json_lacks_is_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))


@given(st.binary())
def test_bytes_come_back(data: bytes) -> None:
    assert from_text(to_text(data)) == data


@given(st.text(max_size=8))
def test_every_bytes_have_one_text(text: str) -> None:
    try:
        data = from_text(text)
    except ValueError:
        return
    assert to_text(data) == text


def test_digest_is_blake2b() -> None:
    assert digest(b"a", b"b") == digest(b"ab")
    assert digest().hex() == "cae66941d9efbd404e4d88758ea67670"  # b2sum --length 128 of nothing
