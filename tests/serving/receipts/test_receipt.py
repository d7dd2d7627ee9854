from __future__ import annotations

import json
import struct
from hashlib import blake2b
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.receipts.receipt import (
    Chain,
    Receipt,
    ReceiptError,
    canonical_json,
    digest,
    from_text,
    to_text,
)
from tests.serving.receipts.examples import VALUES, receipt_json


def test_comes_back_from_json() -> None:
    written = receipt_json(prompt="abc", seed=7)
    assert Receipt.parse(orjson.loads(orjson.dumps(written))).to_json() == written


def test_is_under_200_bytes_beside_ids_marks_and_sampling() -> None:
    """With every entry family that can choose a token."""
    written = receipt_json() | {"entries": ["decode", "extend", "prefill"]}
    rest = {k: v for k, v in written.items() if k not in ("prompt_ids", "output_ids", "marks", "sampling")}
    assert len(json.dumps(rest, separators=(",", ":"))) < 200


def test_has_a_byte_of_marks_for_each_token() -> None:
    written = receipt_json()
    assert len(from_text(written["marks"])) == len(written["output_ids"])
    assert from_text(written["marks"])[-1] == from_text(written["logits"])[0]


@given(VALUES)
def test_garbage_is_refused_in_a_sentence(value: Any) -> None:
    with pytest.raises(ReceiptError, match="receipt"):
        Receipt.parse(value)


@given(st.sampled_from(sorted(receipt_json())), VALUES)
def test_a_field_of_another_kind_is_refused_or_as_given(name: str, value: Any) -> None:
    try:
        parsed = Receipt.parse(receipt_json() | {name: value})
    except ReceiptError:
        return
    assert json.dumps(parsed.to_json()[name]) == json.dumps(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2, which is newer than 1"),
        ({"version": 0}, "`version`"),
        ({"version": True}, "`version`"),
        ({"version": 1.0}, "`version`"),
        ({"artifact": "short"}, "`artifact`"),
        ({"output_ids": [1]}, "a byte for each of `output_ids`"),
        ({"output_ids": [1, 2, 2**40]}, r"`output_ids\.2`"),
        ({"prompt_ids": [True]}, r"`prompt_ids\.0`"),
        ({"finish": "error"}, "an answer that failed has none"),
        ({"finish": "done"}, "`finish`"),
        ({"key": to_text(b"k" * 8)}, "belong together"),
        ({"more": 1}, "`more`"),
        ({"sampling": []}, "`sampling`"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ReceiptError, match=message):
        Receipt.parse(receipt_json() | change)


def test_a_deep_value_is_refused() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ReceiptError):
        Receipt.parse(receipt_json() | {"sampling": {"max_tokens": deep}})


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


LINKS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(width=32, allow_nan=False)), max_size=9)


def chain(links: list[tuple[int, float]], start: object = "start") -> Chain:
    made = Chain(start)
    for token_id, logit in links:
        made.add(token_id, logit)
    return made


def test_is_the_documented_rule() -> None:
    end = blake2b(b'{"a":1}', digest_size=16).digest()
    marks = b""
    for token_id, logit in [(7, 0.5), (300, -1.25)]:
        end = blake2b(end + struct.pack("<i", token_id) + struct.pack("<f", logit), digest_size=16).digest()
        marks += end[:1]
    made = chain([(7, 0.5), (300, -1.25)], {"a": 1.0})
    assert (made.end, made.marks) == (end, marks)


@given(LINKS, LINKS)
def test_equal_ends_are_of_equal_links(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> None:
    same = [(i, struct.pack("<f", x)) for i, x in one] == [(i, struct.pack("<f", x)) for i, x in other]
    assert (chain(one).end == chain(other).end) is same


@given(LINKS)
def test_the_last_bit_of_a_logit_counts(links: list[tuple[int, float]]) -> None:
    changed = [*links, (1, 12.0)], [*links, (1, struct.unpack("<f", struct.pack("<I", 0x41400001))[0])]
    assert chain(changed[0]).end != chain(changed[1]).end
    assert chain(changed[0]).marks[:-1] == chain(changed[1]).marks[:-1]


@given(LINKS)
def test_the_start_counts(links: list[tuple[int, float]]) -> None:
    assert chain(links, "other").end != chain(links).end
