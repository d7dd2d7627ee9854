from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.dialects.mended_json import MAX_DEPTH, MendedJson, begins_member, mended

# Texts behind `{`, and what is written of them with it.
CASES = {
    "JSON": ('"a" : [1, {}, "\\u00fc"] ,\n"b": -1.5e3}', '{"a" : [1, {}, "\\u00fc"] ,\n"b": -1.5e3}'),
    "line ends": ('"a": "x\n\ty"}', '{"a": "x\\n\\ty"}'),
    "wrong escapes": ('"a": "\\d\\u12 \\\'"}', '{"a": "\\\\d\\\\u12 \'"}'),
    "lone surrogates": (
        '"\\udc00": "\\ud83d\\ude00\\ud83d\\uD83D\\n\\ud83dx\\uDC00\\ud83d"}',
        '{"\\ufffd": "\\ud83d\\ude00\\ufffd\\ufffd\\n\\ufffdx\\ufffd\\ufffd"}',
    ),
    "single quotes": ("'a': 'say \"b\" \\' c'}", '{"a": "say \\"b\\" \' c"}'),
    "Python's constants": ('"a": [True, False, None]}', '{"a": [true, false, null]}'),
    "bare words": ("a: New York , b: NaN, c: 01}", '{"a": "New York" , "b": "NaN", "c": "01"}'),
    "trailing commas": ('"a": [1, ], "b": {"c": 2,\n},}', '{"a": [1], "b": {"c": 2}}'),
    "doubled commas": (', "a": [,1,, 2],, "b": 3}', '{ "a": [1, 2], "b": 3}'),
    "no commas": ('"a": "b" "c": ["d" {}]}', '{"a": "b" ,"c": ["d" ,{}]}'),
    "colons": ('"a":: 1, "b" 2}', '{"a": 1, "b" :2}'),
    "no values": ('"a": 1, "b", "c": , "d":}', '{"a": 1}'),
    "brackets of an array": ('"a": [1, [2}', '{"a": [1, [2]]}'),
    "a bracket that nothing opened": ('"a": 1] x', '{"a": 1}'),
    "no quote": ('"a": "b}', '{"a": "b}"}'),
    "half of an escape": ('"a": "b\\u00', '{"a": "b"}'),
    "a mark": ('"a": {"b": 1\n</tool_call>', '{"a": {"b": 1}}'),
    "half of a key": ('"a": 1, "b', '{"a": 1}'),
    "too deep": ('"a": ' + "[" * 5000, '{"a": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}"),
    "digits": ('"a": ' + "1" * 5000 + "}", '{"a": "' + "1" * 5000 + '"}'),
}
FRAGMENTS = [
    '"',
    "'",
    "\\",
    "\\u",
    "00e",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    " ",
    "\n",
    "a",
    "1",
    "-",
    "True",
    "<",
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=2), max_size=20).map("".join)


def written(text: str, size: int) -> str:
    form = MendedJson("{")
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    pieces = []
    for part in parts:
        piece, end = form.read("x" + part, 1)
        pieces.append(piece)
        while form.at_line_end and end is not None:
            piece, end = form.read("x" + part, end)
            pieces.append(piece)
        if end is not None:
            return "".join(pieces)
    return "".join([*pieces, form.close()])


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_faults_are_mended(text: str, expected: str) -> None:
    assert written(text, len(text)) == written(text, 1) == expected
    assert isinstance(orjson.loads(expected), dict)


@given(text=TEXTS, size=st.integers(1, 5))
def test_every_text_becomes_an_object_that_parses(text: str, size: int) -> None:
    result = written(text, size)
    assert result == written(text, len(text) or 1)
    assert isinstance(json.loads(result, parse_constant=pytest.fail), dict)
    assert isinstance(orjson.loads(result), dict)


def test_only_an_array_or_object_alone_is_mended() -> None:
    assert mended("[1, None]") == "[1, null]"
    assert [mended(text) for text in ("", "1", "{} x", "[1", "{{}}")] == [None] * 5


def test_a_member_begins_with_a_quote_or_a_word() -> None:
    assert all(map(begins_member, "\"'}a_1"))
    assert not any(map(begins_member, " \n{[:,<"))
