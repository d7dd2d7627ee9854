"""However an answer is cut into deltas, what is parsed of them joins to what is parsed of the whole."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.dialects.choose import REASONING_DIALECTS, TOOL_DIALECTS
from shortfin_apps.llm.serving.dialects.dialect import Dialect
from shortfin_apps.llm.serving.dialects.feed import Arguments, CallStart, Content, Piece
from shortfin_apps.llm.serving.dialects.output_parser import OutputParser, joined, whole
from tests.serving.dialects.answers import ANSWERS, FUNCTIONS, GLM, XML, Answer

DIALECTS = [
    Dialect(tools, reasoning)
    for tools in (None, *TOOL_DIALECTS.values())
    for reasoning in (None, *REASONING_DIALECTS.values())
]
# What the parsers look for, beginnings of it, and what may be in the middle of it.
FRAGMENTS = [
    *sorted(set().union(*(dialect.marks for dialect in DIALECTS))),
    *(
        "<",
        "<tool",
        "</think",
        "[TOOL",
        "<|",
        "Here is my",
        "to=functions.now ",
        "assistant",
        ";",
        "\n",
        "  ",
    ),
    *(
        '{"name": "now", "arguments": ',
        '{"name": "now"',
        '"parameters": {}',
        '{"a": "\\"}',
        '\\u00fc"',
        "{",
        "}",
    ),
    *(
        "[",
        "]",
        ",",
        '"',
        "\\",
        "null",
        '"\\ud800"',
        "12",
        "<function=now>",
        "<function=",
        "<parameter=city>",
        "</parameter>",
    ),
    *(
        "</function>",
        "Here is my thought process:",
        "Here is my response:",
        "word",
        "ü€",
        "<|channel|>analysis",
    ),
]
# Marks, JSON's punctuation, and what is between.
PARTS = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]|[\"{}\[\]:,;\\]|\w+|\s+|.")
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14).map("".join)
IDS = [f"{a.tools}-{a.reasoning}-{index}" for index, a in enumerate(ANSWERS)]


def dialect_of(answer: Answer) -> Dialect:
    return Dialect(
        None if answer.tools is None else TOOL_DIALECTS[answer.tools],
        None if answer.reasoning is None else REASONING_DIALECTS[answer.reasoning],
    )


def parsed(
    dialect: Dialect, deltas: Sequence[str], is_open: bool = False, *, is_cut: bool = False
) -> list[Piece]:
    parser = OutputParser(dialect, FUNCTIONS, is_open=is_open)
    pieces = [piece for delta in deltas for piece in parser.push(delta)]
    return joined([*pieces, *parser.finish(is_cut=is_cut)])


def whole_of(answer: Answer) -> list[Piece]:
    return whole(dialect_of(answer), answer.text, FUNCTIONS, is_open=answer.is_open, is_cut=answer.is_cut)


def in_parts(answer: Answer, deltas: Sequence[str]) -> list[Piece]:
    return parsed(dialect_of(answer), deltas, answer.is_open, is_cut=answer.is_cut)


def check_calls(pieces: Sequence[Piece], *, is_cut: bool = False) -> None:
    """Every call has arguments that are a JSON object; of a cut answer, but the last."""
    for place, piece in enumerate(pieces):
        arguments = pieces[place + 1 : place + 2]
        if isinstance(piece, CallStart) and not (is_cut and place + 2 >= len(pieces)):
            assert isinstance(arguments[0], Arguments), pieces
            assert isinstance(json.loads(arguments[0].text, parse_constant=pytest.fail), dict), pieces
            assert orjson.loads(arguments[0].text) is not None


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = [*sorted(place for place in places if place < len(text)), len(text)]
    return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("answer", ANSWERS, ids=IDS)
def test_an_answer_has_its_pieces(answer: Answer) -> None:
    assert whole_of(answer) == answer.pieces
    check_calls(answer.pieces, is_cut=answer.is_cut)


@pytest.mark.parametrize("answer", ANSWERS, ids=IDS)
def test_an_answer_has_its_pieces_wherever_it_is_cut(answer: Answer) -> None:
    """In every two and three deltas, and in characters."""
    text = answer.text
    assert in_parts(answer, list(text)) == answer.pieces
    for first in range(min(len(text), 200)):
        for second in range(first, min(len(text), 200), 11):
            deltas = cut(text, [first, second])
            assert in_parts(answer, deltas) == answer.pieces, deltas


@given(
    dialect=st.sampled_from(DIALECTS),
    text=TEXTS | st.sampled_from(ANSWERS).map(lambda answer: answer.text),
    places=st.lists(st.integers(0, 200)),
    is_open=st.booleans(),
    is_cut=st.booleans(),
)
@example(DIALECTS[0], "", [0], False, False)
def test_deltas_join_to_the_whole(
    dialect: Dialect, text: str, places: list[int], is_open: bool, is_cut: bool
) -> None:
    expected = whole(dialect, text, FUNCTIONS, is_open=is_open, is_cut=is_cut)
    assert parsed(dialect, cut(text, places), is_open, is_cut=is_cut) == expected
    assert parsed(dialect, list(text), is_open, is_cut=is_cut) == expected
    check_calls(expected, is_cut=is_cut)


@pytest.mark.parametrize("answer", ANSWERS, ids=IDS)
def test_an_answer_with_one_fault_has_calls_that_parse(answer: Answer) -> None:
    """With each mark and bracket left out, doubled, or with a word before it."""
    if len(answer.text) > 500:
        return
    parts = PARTS.findall(answer.text)
    for place, part in enumerate(parts):
        for fault in ("", part * 2, "word " + part):
            text = "".join([*parts[:place], fault, *parts[place + 1 :]])
            check_calls(whole_of(answer._replace(text=text, is_cut=False)))


@given(
    answer=st.sampled_from(ANSWERS),
    faults=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["", 2, "word ", "\n"])), max_size=4),
    end=st.integers(0, 200),
    is_cut=st.booleans(),
)
def test_an_answer_with_faults_has_calls_that_parse(
    answer: Answer, faults: list[tuple[int, str | int]], end: int, is_cut: bool
) -> None:
    parts = PARTS.findall(answer.text)[:200]
    for place, fault in faults:
        if place < len(parts):
            parts[place] = parts[place] * fault if isinstance(fault, int) else fault
    text = "".join(parts)[:end]
    damaged = answer._replace(text=text, is_cut=is_cut)
    check_calls(whole_of(damaged), is_cut=is_cut)
    assert in_parts(damaged, list(text)) == whole_of(damaged)


@given(dialect=st.sampled_from(DIALECTS), text=TEXTS)
def test_arguments_follow_a_call(dialect: Dialect, text: str) -> None:
    """And every piece can be sent."""
    pieces = whole(dialect, text, FUNCTIONS)
    check_calls(pieces)
    assert orjson.dumps([dataclasses.asdict(piece) for piece in pieces])
    for before, piece in zip([None, *pieces], pieces, strict=False):
        if isinstance(piece, Arguments):
            assert isinstance(before, CallStart)


@given(text=st.text() | TEXTS)
def test_text_without_a_dialect_is_content(text: str) -> None:
    assert whole(Dialect(), text) == ([Content(text)] if text else [])


STRINGS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=5,
)
WRITERS = {
    "hermes": '<tool_call>\n{{"name": "now", "arguments": {}}}\n</tool_call>',
    "smollm": '<tool_call>[{{"name": "now", "arguments": {}}}]</tool_call>',
    "granite": '<|tool_call|>[{{"name": "now", "arguments": {}}}]',
    "llama3": '{{"name": "now", "parameters": {}}}',
    "mistral": "[TOOL_CALLS]now[ARGS]{}",
    "harmony": "<|channel|>commentary to=functions.now<|message|>{}",
}


@pytest.mark.parametrize("name", WRITERS)
@given(arguments=st.dictionaries(STRINGS, VALUES, max_size=3), ascii_only=st.booleans(), indent=st.booleans())
def test_arguments_are_the_models_own(name: str, arguments: object, ascii_only: bool, indent: bool) -> None:
    text = json.dumps(arguments, ensure_ascii=ascii_only, indent=2 if indent else None)
    pieces = parsed(Dialect(TOOL_DIALECTS[name]), list(WRITERS[name].format(text)))
    assert pieces == [CallStart("now"), Arguments(text)]


@given(
    city=STRINGS.filter(lambda text: "\n" not in (text[:1], text[-1:]) and "</" not in text),
    days=st.integers(),
)
def test_parameters_in_tags_become_json(city: str, days: int) -> None:
    parameters = f"<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n{days}</parameter>"
    text = f"<function=get_weather>\n{parameters}</function>"
    start, arguments = parsed(Dialect(TOOL_DIALECTS["qwen3-coder"]), list(text))
    assert start == CallStart("get_weather")
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.text) == {"city": city, "days": days}


@given(city=STRINGS.filter(lambda text: "<" not in text), days=st.integers())
def test_names_and_values_in_tags_become_json(city: str, days: int) -> None:
    text = (
        f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n"
        f"<arg_key>days</arg_key>\n<arg_value>{days}</arg_value>\n</tool_call>"
    )
    start, arguments = parsed(Dialect(TOOL_DIALECTS["glm"]), list(text))
    assert start == CallStart("get_weather")
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.text) == {"city": city, "days": days}


REQUIRED = WRITERS | {"qwen3-coder": XML, "glm": GLM}


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("text", ["{}", "<think>hm</think>\n{}", "{0}\n{0}"])
def test_a_required_call_is_never_content_wherever_it_is_cut(name: str, text: str) -> None:
    dialect = Dialect(TOOL_DIALECTS[name], REASONING_DIALECTS["harmony" if name == "harmony" else "think"])
    answer = text.format(REQUIRED[name].format('{"a": 1}'))
    for end in range(len(answer) + 1):
        parser = OutputParser(dialect, FUNCTIONS, is_required=True)
        pieces = joined([*parser.push(answer[:end]), *parser.finish(is_cut=True)])
        assert not [piece for piece in pieces if isinstance(piece, Content)], answer[:end]


def test_the_first_of_several_calls_ends_an_answer_if_only_one_is_wanted() -> None:
    answer = next(a for a in ANSWERS if a.tools == "mistral" and a.text.startswith("a"))
    parser = OutputParser(dialect_of(answer), FUNCTIONS, parallel=False)
    pieces = [*(piece for char in answer.text for piece in parser.push(char)), *parser.finish()]
    assert joined(pieces) == answer.pieces[:3]
