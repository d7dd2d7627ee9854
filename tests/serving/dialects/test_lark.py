"""What a grammar of calls lets through is parsed as calls, and what models write as calls it lets through."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken

from shortfin_apps.llm.components.grammar.compiled import compiled as compiled_here
from shortfin_apps.llm.components.grammar.compiler import GrammarCompiler
from shortfin_apps.llm.components.grammar.source import GrammarKind, GrammarSource, check_size
from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.schema import MAX_TOOLS
from shortfin_apps.llm.serving.api.tools import MAX_CALLS
from shortfin_apps.llm.serving.dialects import lark as lark_module
from shortfin_apps.llm.serving.dialects.choose import REASONING_DIALECTS, TOOL_DIALECTS
from shortfin_apps.llm.serving.dialects.dialect import Dialect, Function
from shortfin_apps.llm.serving.dialects.feed import Arguments, CallStart, Reasoning
from shortfin_apps.llm.serving.dialects.lark import Lark
from shortfin_apps.llm.serving.dialects.output_parser import whole
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from tests.serving.dialects.matching import lets_through
from tests.serving.text.tiny_tokenizers import EOS, byte_level_backend

CITY = {"type": "string", "maxLength": 9}
WEATHER = Function(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": CITY,
            "days": {"type": "integer"},
            "units": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOW = Function("now")
XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n{}</function>\n</tool_call>"
GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n{}</tool_call>"
GLM_DAYS = "<arg_key>days</arg_key>\n<arg_value>{}</arg_value>\n"
DAYS = "<parameter=days>\n{}\n</parameter>\n"
COMMENTARY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
# Of each dialect: texts of calls, and others.
FITTING = {
    "hermes": [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ü\\n", "days": 3}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": ""}}\n</tool_call>',
    ],
    "smollm": ['<tool_call>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]</tool_call>'],
    "granite": ['<|tool_call|>[{"name": "get_weather", "arguments": {"city": "a]"}}]'],
    "llama3": ['{"name": "get_weather", "parameters": {"city": "a"}}; {"name": "now", "parameters": {}}'],
    "mistral": [
        '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
        '[TOOL_CALLS]get_weather[ARGS]{"city": "a"}',
    ],
    "qwen3-coder": [XML.format("two\nlines", DAYS.format(3)), XML.format("", "")],
    "glm": [
        GLM.format("two\nl", GLM_DAYS.format(3)),
        GLM.format("", "").replace("\n", "") * 2,
        f"<tool_call>now\n</tool_call>\n{GLM.format('a', '')}",
    ],
    "harmony": [COMMENTARY.format("now", "{}"), COMMENTARY.format("get_weather", '{"city": "a"}')],
}
OTHER = {
    "hermes": ["Sure. ", '<tool_call>\n{"name": "then"', '<tool_call>\n{"name": "now", "arguments": {"a'],
    "smollm": ['<tool_call>\n{"name"', "Sure."],
    "granite": ["<|tool_call|>{", "[{"],
    "llama3": ['{"name": "get_weather", "parameters": {"city": "0123456789', '{"a'],
    "mistral": ["now", "[TOOL_CALLS]then"],
    "qwen3-coder": [XML.format("a", DAYS.format("three")), "<tool_call>\n<function=then"],
    "glm": [GLM.format("a", GLM_DAYS.format("three")), "<tool_call>then", GLM.format("0123456789", "")],
    "harmony": ["<|channel|>final", COMMENTARY.format("then", "{}")],
}
# Of each dialect: what begins as a call, and is none.
UNFIT = {
    "hermes": ['Sure. <tool_call>\n{"name": "then"', '<tool_call>\n{"name": "now", "arguments": {"a'],
    "smollm": ['<tool_call>\n{"name"', 'Sure.<tool_call>[{"name": "then"'],
    "granite": ["a <|tool_call|>{", '<tool_call>[{"name": "then"'],
    "llama3": [' {"name": "then"', '{"name": "get_weather", "parameters": {"city": "0123456789'],
    "mistral": ["now[TOOL_CALLS]then", "[TOOL_CALLS] "],
    "qwen3-coder": [XML.format("a", DAYS.format("three")), "a<function=then", "<tool_call>then"],
    "glm": [GLM.format("a", GLM_DAYS.format("three")), "a<tool_call>then", "<tool_call>\nnow"],
    "harmony": [COMMENTARY.format("then", "{}"), COMMENTARY.format("now", '{"a')],
}
# Of each dialect: answers that no function has to be called in.
FREE = {
    "harmony": ["<|channel|>final<|message|>Sure."],
}
CALL_LATER = {
    "llama3": " \n{}",
    "harmony": "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant{}",
}
CASES = [(name, special) for name in FITTING for special in (True, False)]
# A thought that an answer begins with, and one that the prompt has opened.
THOUGHTS = {
    "think": ("<think>\na < b\n</think>\n\n", "so\n</think>\n\n"),
    "mistral": ("[THINK]a [b[/THINK]", "so[/THINK]"),
    "granite": ("Here is my thought process: a\nHere is my response:\n", ""),
    "harmony": ("<|channel|>analysis<|message|>a < b<|end|><|start|>assistant", ""),
}


def tokenizer_with(marks: frozenset[str], special: bool) -> Tokenizer:
    """With the marks as special tokens, or as plain text."""
    backend = byte_level_backend()
    if special:
        backend.add_special_tokens([AddedToken(mark, special=True) for mark in sorted(marks)])
    return Tokenizer(backend, {"eos_token": EOS})


async def compiled(tokenizer: Tokenizer, source: str) -> Grammar:
    compiler = GrammarCompiler(tokenizer.to_json, tokenizer.eos_token_ids)
    return await compiler.compile(GrammarSource(GrammarKind.LARK, source), "tools")


@pytest.mark.parametrize(("name", "special"), CASES)
async def test_calls_as_models_write_them_fit(name: str, special: bool) -> None:
    dialect = TOOL_DIALECTS[name]
    tokenizer = tokenizer_with(dialect.marks, special)
    lark = Lark(tokenizer.special_tokens)
    grammar = await compiled(tokenizer, lark.source(dialect.calls(lark, (WEATHER, NOW), 4)))
    texts = FITTING[name]
    if name == "mistral":  # whose newer form needs a token of its own
        texts = texts[1:] if special else texts[:1]
    for text in texts:
        assert lets_through(grammar, tokenizer, text), text
        pieces = whole(Dialect(dialect), text, (WEATHER, NOW))
        assert {type(piece) for piece in pieces} == {CallStart, Arguments}
        assert all(json.loads(piece.text) is not None for piece in pieces if isinstance(piece, Arguments))
    for text in OTHER[name]:
        assert not lets_through(grammar, tokenizer, text, to_the_end=False), text


@pytest.mark.parametrize(("name", "special"), CASES)
async def test_what_begins_a_call_in_a_free_answer_has_to_be_a_call(name: str, special: bool) -> None:
    dialect = TOOL_DIALECTS[name]
    tokenizer = tokenizer_with(dialect.marks, special)
    lark = Lark(tokenizer.special_tokens)
    grammar = await compiled(tokenizer, lark.source(dialect.answer(lark, (WEATHER, NOW), 4)))
    calls = FITTING[name]
    if name == "mistral":  # whose newer form needs a token of its own
        calls = calls[1:] if special else calls[:1]
    for text in FREE.get(name, ["", "Sure <b", "a\n< b {"]):
        assert lets_through(grammar, tokenizer, text), text
    for call in calls:
        assert lets_through(grammar, tokenizer, call), call
        assert lets_through(grammar, tokenizer, CALL_LATER.get(name, "Let me see: {}").format(call)), call
        assert not lets_through(grammar, tokenizer, call[:-1]), call
    for text in UNFIT[name]:
        assert not lets_through(grammar, tokenizer, text, to_the_end=False), text


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", THOUGHTS)
async def test_a_thought_may_precede_a_call(name: str, special: bool) -> None:
    reasoning = REASONING_DIALECTS[name]
    tools = TOOL_DIALECTS["harmony" if name == "harmony" else "hermes"]
    dialect = Dialect(tools, reasoning)
    tokenizer = tokenizer_with(dialect.marks, special)
    [call, *_] = FITTING["harmony" if name == "harmony" else "hermes"]
    for prompt, thought in zip(("hi", "hi<think>\n[THINK]"), THOUGHTS[name], strict=True):
        prompt = prompt.removesuffix("[THINK]") if name == "think" else prompt
        is_open = reasoning.is_open(prompt)
        lark = Lark(tokenizer.special_tokens)
        start = f"{reasoning.thought(lark, prompt)} {tools.calls(lark, (WEATHER, NOW), 1)}"
        grammar = await compiled(tokenizer, lark.source(start))
        assert lets_through(grammar, tokenizer, thought + call)
        assert not lets_through(grammar, tokenizer, thought + "Sure.", to_the_end=False)
        pieces = whole(dialect, thought + call, (WEATHER, NOW), is_open=is_open)
        assert isinstance(pieces[0], Reasoning if thought else CallStart)
        assert any(isinstance(piece, CallStart) for piece in pieces)


async def test_a_thought_does_not_spell_a_mark_that_is_one_token() -> None:
    """The parser would end the reasoning there, and the content would have the mark that follows."""
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("</think>")])
    tokenizer = Tokenizer(backend, {"eos_token": EOS})
    lark = Lark(tokenizer.tag_tokens)
    thought = REASONING_DIALECTS["think"].thought(lark, "<think>")
    matcher = (await compiled(tokenizer, lark.source(f'{thought} "{{}}"'))).matcher()
    spelled = [token_id for char in "a</think>" for token_id in tokenizer.encode(char)]
    masks = [int.from_bytes(matcher.allowed(spelled[:place]), "little") for place in range(len(spelled))]
    is_allowed = [bool(mask >> token_id & 1) for mask, token_id in zip(masks, spelled, strict=True)]
    assert is_allowed == [True] * 8 + [False]
    assert masks[-1] >> tokenizer.tag_tokens["</think>"] & 1


async def test_no_thought_follows_one_that_the_prompt_has_closed() -> None:
    lark = Lark({})
    assert REASONING_DIALECTS["think"].thought(lark, "<think>\n\n</think>\n\n") == ""


async def test_no_more_calls_fit_than_are_wanted() -> None:
    dialect = TOOL_DIALECTS["hermes"]
    tokenizer = tokenizer_with(frozenset(), special=False)
    two = FITTING["hermes"][1]
    for most, fits in ((1, False), (2, True)):
        lark = Lark({})
        grammar = await compiled(tokenizer, lark.source(dialect.calls(lark, (WEATHER, NOW), most)))
        assert lets_through(grammar, tokenizer, two, to_the_end=False) is fits


@pytest.mark.parametrize("form", ["calls", "answer"])
@pytest.mark.parametrize("name", TOOL_DIALECTS)
def test_as_many_functions_as_a_request_may_have_fit_with_any_arguments(name: str, form: str) -> None:
    """Which is what is left of those without `strict` where their schemas take too much."""
    functions = [Function(f"{place:_>64}", {"type": "object"}) for place in range(MAX_TOOLS)]
    dialect, lark = TOOL_DIALECTS[name], Lark({})
    source = lark.source(getattr(dialect, form)(lark, functions, MAX_CALLS))
    check_size(GrammarSource(GrammarKind.LARK, source), "tools")


@pytest.mark.parametrize("special", [True, False])
async def test_tags_that_are_one_token_match_by_that_token(special: bool) -> None:
    """Qwen 3's are added tokens without the flag `special`, which the library takes for special ones."""
    backend = byte_level_backend()
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    backend.add_tokens([AddedToken(tag, special=special) for tag in tags])
    tokenizer = Tokenizer(backend, {"eos_token": EOS})
    lark = Lark(tokenizer.tag_tokens)
    thought = REASONING_DIALECTS["think"].thought(lark, "<think>")
    calls = TOOL_DIALECTS["hermes"].calls(lark, (WEATHER, NOW), 1)
    grammar = await compiled(tokenizer, lark.source(f"{thought} {calls}"))
    text = "hm</think>\n\n" + FITTING["hermes"][0]
    assert {backend.token_to_id(tag) for tag in tags[1:]} <= set(tokenizer.encode(text))
    assert lets_through(grammar, tokenizer, text)


@contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(InvalidRequestError, match="tools"):
        yield


async def test_only_strict_parameters_are_refused_for_a_keyword_that_cannot_be_kept() -> None:
    tokenizer = tokenizer_with(frozenset(), special=False)
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    sources = []
    for strict in (False, True):
        lark = Lark({})
        calls = TOOL_DIALECTS["llama3"].calls(lark, [Function("f", schema, strict)], 1)
        sources.append(lark.source(calls))
    await compiled(tokenizer, sources[0])
    with refused():
        await compiled(tokenizer, sources[1])


@pytest.mark.parametrize(
    ("parameters", "fits"),
    [
        ({"properties": {"a": {}}, "required": ["b"]}, True),
        ({"properties": {"a": {}}, "required": None}, False),
        ({"properties": None, "required": ["b"]}, False),
        ({"properties": {"a": {}}}, False),
        ({"properties": {"a": {}}, "additionalProperties": True}, True),
        ({"anyOf": [{"properties": {"a": {}}}]}, True),
        ({}, False),
    ],
)
async def test_arguments_that_are_not_listed_do_not_fit(parameters: dict[str, Any], fits: bool) -> None:
    tokenizer = tokenizer_with(frozenset(), special=False)
    lark = Lark({})
    source = lark.source(TOOL_DIALECTS["llama3"].calls(lark, [Function("f", parameters)], 1))
    text = '{"name": "f", "parameters": {"b'
    assert lets_through(await compiled(tokenizer, source), tokenizer, text, to_the_end=False) is fits


@pytest.mark.parametrize("parameters", [{"type": "dict"}, {"type": ["string", "object"]}, {"type": None}])
async def test_arguments_are_an_object_whatever_a_schema_says(parameters: dict[str, Any]) -> None:
    tokenizer = tokenizer_with(frozenset(), special=False)
    lark = Lark({})
    source = lark.source(TOOL_DIALECTS["llama3"].calls(lark, [Function("f", parameters)], 1))
    grammar = await compiled(tokenizer, source)
    assert lets_through(grammar, tokenizer, '{"name": "f", "parameters": {"b": 1}}')
    assert not lets_through(grammar, tokenizer, '{"name": "f", "parameters": "', to_the_end=False)


WRONG: list[object] = [
    {"type": None},
    {"type": 5},
    {"type": "any"},
    {"type": "string", "enum": []},
    {"type": "string", "enum": None},
    {"type": "integer", "minimum": "a"},
    {"$ref": "#/$defs/no"},
    None,
]


@pytest.mark.parametrize("name", FITTING)
def test_a_wrong_schema_of_a_function_that_is_not_strict_refuses_nothing(name: str) -> None:
    dialect = TOOL_DIALECTS[name]
    tokenizer = tokenizer_with(dialect.marks, special=True)
    library = LLTokenizer(tokenizer.to_json(), eos_token=sorted(tokenizer.eos_token_ids))
    for schema, required in product(WRONG, (["a"], None, True)):
        parameters = {"type": "object", "properties": {"a": schema}, "required": required}
        lark = Lark(tokenizer.special_tokens)
        source = lark.source(dialect.calls(lark, [Function("f", parameters), WEATHER], 1))
        compiled_here(GrammarSource(GrammarKind.LARK, source), library)


TAGGED = "<tool_call>\n<function=f>\n{}</function>\n</tool_call>"
PARAMETER = "<parameter={}>\n{}\n</parameter>\n"
STRICT_PARAMETERS: dict[str, Any] = {
    "$ref": "#/$defs/base",
    "allOf": [{"properties": {"day": {"type": "string", "format": "date"}}}],
    "required": ["code", "rest"],
    "$defs": {
        "base": {"type": "object", "properties": {"code": {"$ref": "#/$defs/code"}, "on": {"const": True}}},
        "code": {"type": "string", "pattern": "^[A-Z]+$", "not": {"const": "NO"}},
    },
}


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"code": "AB", "rest": "x"}, True),
        (
            {"code": "AB", "on": True, "day": "2024-02-29", "rest": "a</parameter>b</function>"},
            True,
        ),
        ({"code": "AB"}, False),
        ({"code": "NO", "rest": "x"}, False),
        ({"code": "ab", "rest": "x"}, False),
        ({"code": "AB", "on": False, "rest": "x"}, False),
        ({"code": "AB", "day": "today", "rest": "x"}, False),
    ],
)
async def test_strict_parameters_in_tags_fit_their_schema(arguments: dict[str, Any], fits: bool) -> None:
    dialect, function = TOOL_DIALECTS["qwen3-coder"], Function("f", STRICT_PARAMETERS, strict=True)
    tokenizer, lark = tokenizer_with(frozenset(), special=False), Lark({})
    grammar = await compiled(tokenizer, lark.source(dialect.calls(lark, [function], 1)))
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    text = TAGGED.format("".join(PARAMETER.format(key, value) for key, value in texts.items()))
    assert lets_through(grammar, tokenizer, text) is fits
    start, written = whole(Dialect(dialect), text, [function])
    assert start == CallStart("f")
    assert isinstance(written, Arguments)
    assert json.loads(written.text) == arguments


async def test_parameters_in_tags_may_refer_to_each_other() -> None:
    point = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}, "in": {"$ref": "#/properties/to"}}}
    properties = {"to": point, "from": {"$ref": "#/properties/to"}}
    parameters = {"properties": properties, "required": ["from"], "$defs": {"n": {"type": "integer"}}}
    tokenizer, lark = tokenizer_with(frozenset(), special=False), Lark({})
    function = Function("f", parameters, strict=True)
    grammar = await compiled(tokenizer, lark.source(TOOL_DIALECTS["qwen3-coder"].calls(lark, [function], 1)))
    for value, fits in (('{"x": 1, "in": {"x": 2}}', True), ('{"x": "a"}', False), ('{"in": 1}', False)):
        text = TAGGED.format(PARAMETER.format("from", value))
        assert lets_through(grammar, tokenizer, text) is fits


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        ({"minProperties": 1, "properties": {"a": {}}}, "`minProperties`"),
        ({"maxProperties": 0, "properties": {"a": {}}}, "`maxProperties`"),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "`anyOf`"),
        ({"allOf": [{"dependentRequired": {"a": ["b"]}}]}, "`dependentRequired`"),
        ({"required": ["a"], "additionalProperties": False}, "`required` of a strict function names `a`"),
        ({"properties": {"a": {"type": "string", "if": {}}}}, "`if`"),
    ],
)
def test_parameters_in_tags_are_refused_for_what_cannot_be_kept_strictly_alone(
    parameters: dict[str, Any], fault: str
) -> None:
    dialect = TOOL_DIALECTS["qwen3-coder"]
    dialect.calls(Lark({}), [Function("f", parameters)], 1)
    with pytest.raises(InvalidRequestError, match=fault):
        dialect.calls(Lark({}), [Function("f", parameters, strict=True)], 1)


def test_what_forbids_nothing_is_not_refused() -> None:
    trivial = {"minProperties": 1, "maxProperties": 2, "patternProperties": {}, "dependentRequired": {}}
    parameters = {
        "properties": {"a": {}, "b": {}},
        "required": ["a"],
        "propertyNames": {"type": "string"},
        **trivial,
    }
    TOOL_DIALECTS["qwen3-coder"].calls(Lark({}), [Function("f", parameters, strict=True)], 1)


async def test_a_pattern_of_tags_that_no_grammar_can_keep_is_refused_strictly_alone() -> None:
    dialect, tokenizer = TOOL_DIALECTS["qwen3-coder"], tokenizer_with(frozenset(), special=False)
    parameters = {"properties": {"a": {"type": "string", "pattern": "^(?!x)[a-z]+$"}}}
    sources = []
    for strict in (False, True):
        lark = Lark({})
        sources.append(lark.source(dialect.calls(lark, [Function("f", parameters, strict)], 1)))
    await compiled(tokenizer, sources[0])
    with refused():
        await compiled(tokenizer, sources[1])


@pytest.mark.parametrize("strict", [False, True])
def test_a_grammar_is_bounded_while_it_is_built(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter needs a copy of all others, which 400 of them would make 8 MB."""
    built: list[str] = []
    rule = Lark.rule

    def noted(lark: Lark, expression: str) -> str:
        built.append(expression)
        return rule(lark, expression)

    monkeypatch.setattr(Lark, "rule", noted)
    others = {f"p{index}": {"$ref": "#/properties/q"} for index in range(400)}
    function = Function("f", {"properties": {"q": {"type": "integer"}, **others}}, strict=strict)
    with pytest.raises(InvalidRequestError, match="the grammar has more than"):
        TOOL_DIALECTS["qwen3-coder"].calls(Lark({}), [function], 1)
    assert sum(map(len, built)) < 200_000


@pytest.mark.parametrize("dialect", TOOL_DIALECTS)
def test_a_schema_is_bounded_before_it_is_written(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def dumps(value: Any, **options: Any) -> str:
        assert len(str(value)) < 131_072, "writes it"
        return json.dumps(value, **options)

    monkeypatch.setattr(lark_module, "json", SimpleNamespace(dumps=dumps))
    function = Function("f", {"properties": {"a": {"type": "array", "enum": [1.5] * 90_000}}})
    with pytest.raises(InvalidRequestError, match="the grammar has more than"):
        TOOL_DIALECTS[dialect].calls(Lark({}), [function], 1)


@pytest.mark.parametrize(
    "text",
    ['{"maximum": 99999999999999999999999}', '{"enum": ["\\ud800"]}', '{"not": ' * 300 + "{}" + "}" * 300],
    ids=["long integer", "lone surrogate", "deep"],
)
def test_what_texts_of_schemas_may_hold_is_written(text: str) -> None:
    """The compiler says what is wrong with it."""
    lark = Lark({})
    lark.read_schema(json.loads(text))
    rule = lark.json(json.loads(text), strict=True)
    assert f"\n{rule}: %json {text[:-1]}" in lark.source(rule)


@pytest.mark.parametrize("name", ["a>b", "a<b", "a\n", " a "])
def test_names_that_tags_cannot_hold_are_refused_strictly_alone(name: str) -> None:
    lark, parameters = Lark({}), {"properties": {name: {"type": "string"}, "b": {"type": "string"}}}
    source = lark.source(TOOL_DIALECTS["qwen3-coder"].calls(lark, [Function("f", parameters)], 1))
    assert ("<parameter=b>" in source, "<parameter= a" in source) == (True, False)
    with pytest.raises(InvalidRequestError, match="which a tag cannot hold"):
        TOOL_DIALECTS["qwen3-coder"].calls(Lark({}), [Function("f", parameters, strict=True)], 1)
