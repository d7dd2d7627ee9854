"""Answers as models write them, with the pieces that they hold."""

from __future__ import annotations

from typing import NamedTuple

from shortfin_apps.llm.components.dialects.dialect import Function
from shortfin_apps.llm.components.dialects.pieces import Arguments, CallStart, Content, Piece, Reasoning

WEATHER = Function(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "at": {"type": "object", "properties": {"x": {"type": "number"}}},
        },
    },
)
NOW = Function("now")
FUNCTIONS = (WEATHER, NOW)


class Answer(NamedTuple):
    """`tools` and `reasoning` are names of dialects; `is_open`: the prompt opened a thought."""

    tools: str | None
    reasoning: str | None
    text: str
    pieces: list[Piece]
    is_open: bool = False


def call(arguments: str, name: str = "get_weather") -> list[Piece]:
    return [CallStart(name), Arguments(arguments)]


HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a \\"b\\" \\\\"}}\n</tool_call>'
XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
CHANNELS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"

ANSWERS = [
    Answer("hermes", None, "plain <tool text \n", [Content("plain <tool text \n")]),
    Answer("hermes", None, HERMES, call('{"city": "a \\"b\\" \\\\"}')),
    Answer("hermes", None, f"Sure.\n{HERMES}\n", [Content("Sure."), *call('{"city": "a \\"b\\" \\\\"}')]),
    Answer("hermes", None, HERMES * 2, call('{"city": "a \\"b\\" \\\\"}') * 2),
    Answer("hermes", None, '<tool_call>{"name": "now"}</tool_call>', call("{}", "now")),
    Answer("hermes", None, '<tool_call>{"name": "now", "arguments": {}}</tool_call>', call("{}", "now")),
    Answer("hermes", None, '<tool_call>{"arguments": {"a": [1]}, "name": "now"}', call('{"a": [1]}', "now")),
    Answer("hermes", None, '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}',
           call('{"a": 1}', "now")),
    Answer("hermes", None, '<tool_call>{"name": "now", "arguments": null}', call("{}", "now")),
    Answer("hermes", None, '<tool_call>{"name": "now", "arguments": {"a": "}', call('{"a": "}', "now")),
    Answer("hermes", None, '<tool_call>\n{"name": 5}', [Content('<tool_call>\n{"name": 5}')]),
    Answer("hermes", None, '<tool_call>{"name": "\\ud800"}', call("{}", "\ufffd")),
    Answer("hermes", None, '<tool_call>{"name": ' + "[" * 2000,
           [Content('<tool_call>{"name": ' + "[" * 2000)]),
    Answer("hermes", None, "<tool_call>no</tool_call>", [Content("<tool_call>no</tool_call>")]),
    Answer("hermes", "think", f"<think>\na\n\nb\n</think>\n\n{HERMES}",
           [Reasoning("a\n\nb"), *call('{"city": "a \\"b\\" \\\\"}')]),
    Answer("hermes", "think", "a</think>\n\nb\n", [Reasoning("a"), Content("b\n")], is_open=True),
    Answer("hermes", "think", "cut <tool_call>", [Reasoning("cut <tool_call>")], is_open=True),
    Answer(None, "think", " \nb <think>c", [Content(" \nb <think>c")]),
    Answer(None, "think", "<think></think>b", [Content("b")]),
    Answer(None, "mistral", "[THINK]a[/THINK]b", [Reasoning("a"), Content("b")]),
    Answer(None, "granite", "Here's my thought process: a\nHere is my response:\nb",
           [Reasoning("a"), Content("b")]),
    Answer("smollm", None, '<tool_call>[{"name": "now"}, {"name": "now", "arguments": {}}]</tool_call>',
           call("{}", "now") * 2),
    Answer("smollm", None, '<tool_call>[{"name": "now"}, {"nam', [*call("{}", "now"), Content('{"nam')]),
    Answer("granite", None, 'a <|tool_call|>[{"name": "now", "arguments": {"a": "]"}}]',
           [Content("a"), *call('{"a": "]"}', "now")]),
    Answer("llama3", None, '{"name": "now", "parameters": {"a": 1.5}}', call('{"a": 1.5}', "now")),
    Answer("llama3", None, '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; '
           '{"name": "now", "parameters": {"a": []}}', [*call("{}", "now"), *call('{"a": []}', "now")]),
    Answer("llama3", None, '{"name": "Bob", "parameters": {}}; x',
           [Content('{"name": "Bob", "parameters": {}}; x')]),
    Answer("llama3", None, '{"name": "now"}', [Content('{"name": "now"}')]),
    Answer("llama3", None, "[a](b)", [Content("[a](b)")]),
    Answer("mistral", None,
           '[TOOL_CALLS] [{"name": "now", "arguments": {"a": "[TOOL_CALLS]"}, "id": "123456789"}]',
           call('{"a": "[TOOL_CALLS]"}', "now")),
    Answer("mistral", None, 'a[TOOL_CALLS]now[ARGS]{"a": {}}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}',
           [Content("a"), *call('{"a": {}}', "now"), *call("{}", "now")]),
    Answer("mistral", None, "[TOOL_CALLS]now", [Content("[TOOL_CALLS]now")]),
    Answer("qwen3-coder", None, XML.format('x "y"\\\n\n</para'),
           call('{"city": "x \\"y\\"\\\\\\n\\n</para"}')),
    Answer("qwen3-coder", None, "ok\n<tool_call>\n<function=get_weather>\n<parameter=days>\n5\n</parameter>\n"
           "<parameter=units>\n5\n</parameter>\n<parameter=at>\n{\"x\": 1}\n</parameter>\n"
           "<parameter=other>\ntrue\n</parameter>\n</function>\n</tool_call>",
           [Content("ok"), *call('{"days": 5, "units": "5", "at": {"x": 1}, "other": "true"}')]),
    Answer("qwen3-coder", None, "<function=get_weather><parameter=days>NaN</parameter>"
           f"<parameter=at>{'[' * 2000}</parameter>", call('{"days": "NaN", "at": "' + "[" * 2000 + '"')),
    Answer("qwen3-coder", None, "<function=now>\n</function>\n" * 2, call("{}", "now") * 2),
    Answer("qwen3-coder", None, "<tool_call>\n<function=a\nb", [Content("<tool_call>\n<function=a\nb")]),
    Answer("harmony", "harmony", CHANNELS + "<|channel|>final<|message|>b", [Reasoning("hm"), Content("b")]),
    Answer("harmony", None,
           CHANNELS + '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}',
           [Reasoning("hm"), *call('{"a": 1}', "now")]),
    Answer("harmony", None, " to=functions.now<|channel|>commentary json<|message|><|call|>",
           call("{}", "now")),
    Answer("harmony", None,
           "<|channel|>commentary<|message|>First.<|end|>" + CHANNELS + "<|channel|>final<|message|>b",
           [Content("First."), Reasoning("hm"), Content("b")]),
    Answer("harmony", None, "no channel", [Content("no channel")]),
]  # fmt: skip
