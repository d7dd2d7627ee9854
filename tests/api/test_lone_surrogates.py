from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shortfin_apps.llm.api.lone_surrogates import json_of, without_lone_surrogates
from tests.api.harness import CHAT, MESSAGES, Harness

PIECES = st.sampled_from(["\ud83d", "\ude00", "\udbff", "\udc00", "\\", "u", "ud83d", "d83d", '"', "a", "é"])


def repaired(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@given(st.lists(PIECES, max_size=10).map("".join))
@example("\ud83d\ud83d\ude00\ude00")
@example("\\\ud83d")
def test_escaped_surrogates_that_are_alone_are_replaced(text: str) -> None:
    encoded = json.dumps({text: [text]}).encode()
    assert orjson.loads(without_lone_surrogates(encoded)) == {repaired(text): [repaired(text)]}


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


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d\ude00", "é\u2028"])
def test_values_that_quote_a_surrogate_have_json(text: str) -> None:
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert orjson.loads(json_of({"error": text, "n": [1, None]})) == {"error": whole, "n": [1, None]}


async def test_an_error_may_quote_a_lone_surrogate() -> None:
    schema = '{"type":"object","properties":{"\\ud800":{"type":"string","pattern":"(?=x)"}}}'
    body = {"messages": MESSAGES, "guided_json": schema}
    response = await Harness().post(CHAT, body)
    assert response.status_code == 400, response.text
