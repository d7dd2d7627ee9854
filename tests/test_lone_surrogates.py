from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shortfin_apps.llm.lone_surrogates import encodable, json_of, without_lone_surrogates
from tests.serving.api.harness import CHAT, MESSAGES, Harness

PIECES = st.sampled_from(["\ud83d", "\ude00", "\udbff", "\udc00", "\\", "u", "ud83d", "d83d", '"', "a", "é"])


@given(st.text(st.characters(exclude_categories=())))
@example("a\ud83d")
@example("\ud83d\ude00")
def test_every_text_can_be_made_encodable(text: str) -> None:
    utf_8 = encodable(text).encode()
    if not any("\ud800" <= char <= "\udfff" for char in text):
        assert utf_8.decode() == text


def test_a_pair_in_two_characters_is_one() -> None:
    assert encodable("\ud83d\ude00 \ude00\ud83d") == "\U0001f600 \ufffd\ufffd"


@given(st.lists(PIECES, max_size=10).map("".join))
@example("\ud83d\ud83d\ude00\ude00")
@example("\\\ud83d")
def test_escaped_surrogates_that_are_alone_are_replaced(text: str) -> None:
    encoded = json.dumps({text: [text]}).encode()
    assert orjson.loads(without_lone_surrogates(encoded)) == {encodable(text): [encodable(text)]}


def test_escapes_may_have_capital_letters() -> None:
    text = without_lone_surrogates(rb'"\uD83D\uDE00 \uD83d \uDe00 \\uD83D"')
    assert orjson.loads(text) == "\U0001f600 \ufffd \ufffd \\uD83D"


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=10))
def test_other_texts_stay_as_they_are(text: str) -> None:
    for ascii_only in (True, False):
        encoded = json.dumps([text], ensure_ascii=ascii_only).encode()
        assert without_lone_surrogates(encoded) == encoded


@pytest.mark.parametrize("code_point", [0xD800, 0xDBFF, 0xDC00, 0xDFFF])
def test_surrogates_that_are_encoded_are_replaced(code_point: int) -> None:
    encoded = f'"a{chr(code_point)}b"'.encode("utf-8", "surrogatepass")
    assert orjson.loads(without_lone_surrogates(encoded)) == "a\ufffdb"


@given(st.binary(max_size=20))
def test_what_is_not_json_does_not_become_json(text: bytes) -> None:
    """Unless surrogates were all that was wrong with it."""
    changed = without_lone_surrogates(text)
    if b"\xed" not in text and b"\\u" not in text:
        assert changed == text


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        ("a\ud83d", "a\ufffd"),
        ({"\ud83d": ["\ude00", ("a\ude00", 1)]}, {"\ufffd": ["\ufffd", ["a\ufffd", 1]]}),
        (MappingProxyType({"a": "\ud83d"}), {"a": "\ufffd"}),
        (["\ud83d", float("nan")], ["\ufffd", None]),
        ("\ud83d\ude00", "\U0001f600"),  # a pair in two characters
        ([1, None, "é\u2028"], [1, None, "é\u2028"]),
    ],
)
def test_values_with_lone_surrogates_have_json(value: Any, sent: Any) -> None:
    assert orjson.loads(json_of(value)) == sent


def test_options_hold_with_lone_surrogates() -> None:
    assert json_of({1: "\ud83d"}, orjson.OPT_NON_STR_KEYS) == '{"1":"\ufffd"}'.encode()


@pytest.mark.parametrize("value", [object(), ["\ud83d", object()]])
def test_what_json_cannot_express_is_an_error(value: object) -> None:
    with pytest.raises(TypeError):
        json_of(value)


async def test_an_error_may_quote_a_lone_surrogate() -> None:
    schema = '{"type":"object","properties":{"\\ud800":{"type":"string","pattern":"(?=x)"}}}'
    body = {"messages": MESSAGES, "guided_json": schema}
    response = await Harness().post(CHAT, body)
    assert response.status_code == 400, response.text
