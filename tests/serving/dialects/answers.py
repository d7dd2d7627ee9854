"""Answers as models write them, with the pieces that they hold."""

from __future__ import annotations

from typing import NamedTuple

from shortfin_apps.llm.serving.dialects.dialect import Function
from shortfin_apps.llm.serving.dialects.feed import Arguments, CallStart, Content, Piece, Reasoning

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
    """`tools` and `reasoning` are names of dialects; `is_open`: the prompt opened a thought.

    `is_cut`: the model did not end it.
    """

    tools: str | None
    reasoning: str | None
    text: str
    pieces: list[Piece]
    is_open: bool = False
    is_cut: bool = False


def call(arguments: str, name: str = "get_weather") -> list[Piece]:
    return [CallStart(name), Arguments(arguments)]


HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a \\"b\\" \\\\"}}\n</tool_call>'
XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
)
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
    Answer("hermes", None, '<tool_call>{"name": "now", "id": "1"}</tool_call>', call("{}", "now")),
    Answer("hermes", None, '<tool_call>{"name": "now", "args": {"a": 1}}',
           [Content('<tool_call>{"name": "now", "args": {"a": 1}}')]),
    Answer("hermes", None, '<tool_call>{"name": "now", "arguments": {"a": "}', call('{"a": "}', "now"),
           is_cut=True),
    Answer("hermes", None, '<tool_call>{"name": "now", "arguments": {"a": "}', call('{"a": "}"}', "now")),
    Answer("hermes", None, '<tool_call>{"name": "now", "arguments": {"a": 12, "b"', call('{"a": 12', "now"),
           is_cut=True),
    Answer("hermes", None, '<tool_call>{"name": "now", "arguments": {"a": 1,}}\n</tool_call>\nSo.',
           [*call('{"a": 1}', "now"), Content("So.")]),
    Answer("hermes", None, '<tool_call>{"name": "now", "arguments": {"a": [1\n</tool_call>So.',
           [*call('{"a": [1]}', "now"), Content("So.")]),
    Answer("hermes", None, '<tool_call>{"name": "now", "arguments": {"a": "x\ny"}}}</tool_call></tool_call>',
           call('{"a": "x\\ny"}', "now")),
    Answer("hermes", None, '<tool_call>\n<tool_call>{"name": "now", "arguments": {\'a\': True}}',
           call('{"a": true}', "now")),
    Answer("hermes", None, '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
           [Content('<tool_call>{"name": "now", "arguments": [1]}</tool_call>')]),
    Answer("hermes", None,
           '<tool_call>\n{"name": "now", "arguments": {"a": "x\n</tool>}}\n</tool_call>\n' + HERMES,
           [*call('{"a": "x\\n</tool>}}"}', "now"), *call('{"city": "a \\"b\\" \\\\"}')]),
    Answer("hermes", None, "<tool_call>[]</tool_call>", [Content("<tool_call>[]</tool_call>")]),
    Answer("hermes", None, '<tool_call>{"name": "now", "arguments": {}, "id": 1 <tool_call>{"name": "now"}',
           call("{}", "now") * 2),
    Answer("hermes", None, '<tool_call>\n{"name": 5}', [Content('<tool_call>\n{"name": 5}')]),
    Answer("hermes", None, '<tool_call>{"name": "\\ud800"}', call("{}", "\ufffd")),
    Answer("hermes", None, '<tool_call>{"name": ' + "[" * 2000,
           [Content('<tool_call>{"name": ' + "[" * 2000)]),
    Answer("hermes", None, "<tool_call>no</tool_call>", [Content("<tool_call>no</tool_call>")]),
    Answer("hermes", "think", f"<think>\na\n\nb\n</think>\n\n{HERMES}",
           [Reasoning("a\n\nb"), *call('{"city": "a \\"b\\" \\\\"}')]),
    Answer("hermes", "think", "a</think>\n\nb\n", [Reasoning("a"), Content("b\n")], is_open=True),
    Answer("hermes", "think", "cut <tool_call>", [Reasoning("cut <tool_call>")], is_open=True),
    Answer("hermes", "think", "I <tool_call> it</think>b", [Reasoning("I <tool_call> it"), Content("b")],
           is_open=True),
    Answer("hermes", "think", f"<think>hm\n{HERMES}\n</think>b",
           [Reasoning("hm"), *call('{"city": "a \\"b\\" \\\\"}'), Content("b")]),
    Answer("hermes", "granite", f"Here is my thought process: hm {HERMES}",
           [Reasoning("hm"), *call('{"city": "a \\"b\\" \\\\"}')]),
    Answer("qwen3-coder", "think", "hm <tool_call>\n<function=now>\n</function>\n</tool_call>",
           [Reasoning("hm"), *call("{}", "now")], is_open=True),
    Answer("mistral", "mistral", '[THINK]hm[TOOL_CALLS][{"name": "now", "arguments": {}}]',
           [Reasoning("hm"), *call("{}", "now")]),
    Answer("llama3", "think", 'hm <|python_tag|>{"name": "now", "parameters": {}}',
           [Reasoning("hm"), *call("{}", "now")], is_open=True),
    Answer("granite", "granite", 'Here is my thought process: hm<|tool_call|>[{"name": "now"}]',
           [Reasoning("hm"), *call("{}", "now")]),
    Answer("harmony", "harmony", "<|channel|>analysis<|message|>hm<|channel|>commentary to=functions.now"
           "<|message|>{}<|call|>", [Reasoning("hm"), *call("{}", "now")]),
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
    Answer("mistral", None, '[TOOL_CALLS]now{"a": 1}}[TOOL_CALLS][TOOL_CALLS]now[ARGS][TOOL_CALLS]now[ARGS]x',
           [*call('{"a": 1}', "now"), *call("{}", "now"), Content("[TOOL_CALLS]now[ARGS]x")]),
    Answer("mistral", None, "[TOOL_CALLS]a b[TOOL_CALLS]now[ARGS]{}",
           [Content("[TOOL_CALLS]a b"), *call("{}", "now")]),
    Answer("qwen3-coder", None, XML.format('x "y"\\\n\n</para'),
           call('{"city": "x \\"y\\"\\\\\\n\\n</para"}')),
    Answer("qwen3-coder", None, "ok\n<tool_call>\n<function=get_weather>\n<parameter=days>\n5\n</parameter>\n"
           "<parameter=units>\n5\n</parameter>\n<parameter=at>\n{\"x\": 1}\n</parameter>\n"
           "<parameter=other>\ntrue\n</parameter>\n</function>\n</tool_call>",
           [Content("ok"), *call('{"days": 5, "units": "5", "at": {"x": 1}, "other": "true"}')]),
    Answer("qwen3-coder", None, "<function=get_weather><parameter=days>NaN</parameter>"
           f"<parameter=at>{'[' * 2000}</parameter>", call('{"days": "NaN", "at": "' + "[" * 2000 + '"}')),
    Answer("qwen3-coder", None, "<function=get_weather><parameter=city>a</parameter><parameter=days>1",
           call('{"city": "a", "days": '), is_cut=True),
    Answer("qwen3-coder", None, XML.format("Dallas").replace("\n</parameter>", ""),
           call('{"city": "Dallas"}')),
    Answer("qwen3-coder", None, XML.format("Dallas").replace("</parameter>", "</parameter>\n</parameter>"),
           call('{"city": "Dallas"}')),
    Answer("qwen3-coder", None, XML.format("Dallas").replace("\n</function>", "") + "\nSo.",
           [*call('{"city": "Dallas"}'), Content("So.")]),
    Answer("qwen3-coder", None, XML.format("Dallas").replace("</parameter>", "</parameter>\nSo.\n"),
           [*call('{"city": "Dallas"}'), Content("So.")]),
    Answer("qwen3-coder", None, XML.format("Dallas").replace("weather>", "weather>\nSo."),
           [*call('{"city": "Dallas"}'), Content("So.")]),
    Answer("qwen3-coder", None,
           XML.format("Dallas").replace("<parameter", "<parameter=<b>x</parameter>\n<parameter"),
           [*call('{"city": "Dallas"}'), Content("<b>x")]),
    Answer("qwen3-coder", None,
           "<tool_call>" + XML.format("Dallas").replace("city>", "city>\n<parameter=city>"),
           call('{"city": "Dallas"}')),
    Answer("qwen3-coder", None,
           "<tool_call>\n<function=get_weather>\n<parameter=at>\n{'x': True, 'y': None}\n"
           "</parameter>\n<parameter=units>\nNone\n<parameter=days>3.0\n</function>",
           call('{"at": {"x": true, "y": null}, "units": null, "days": 3.0}')),
    Answer("qwen3-coder", None, "The <function=now> function, or <function=get_weather>.",
           [Content("The <function=now> function, or <function=get_weather>.")]),
    Answer("qwen3-coder", None, "<tool_call>\n<function=now>", [Content("<tool_call>\n<function=now>")],
           is_cut=True),
    Answer("qwen3-coder", None, "<function=now>\n</function>\n" * 2, call("{}", "now") * 2),
    Answer("qwen3-coder", None, "<tool_call>\n<function=a\nb", [Content("<tool_call>\n<function=a\nb")]),
    Answer("glm", None, GLM.format('x "y"\\\n\n</arg'),
           call('{"city": "x \\"y\\"\\\\\\n\\n</arg", "days": 5}')),
    Answer("glm", "think", "<think>hm</think>\nok\n" + GLM.format("a").replace("\n", ""),
           [Reasoning("hm"), Content("ok"), *call('{"city": "a", "days": 5}')]),
    Answer("glm", "think", "<think>hm" + GLM.format("a") + "So.",
           [Reasoning("hm"), *call('{"city": "a", "days": 5}'), Content("So.")]),
    Answer("glm", None,
           "<tool_call>get_weather<arg_key>units</arg_key><arg_value>5</arg_value><arg_key>at</arg_key>"
           '<arg_value>{"x": 1}</arg_value><arg_key>other</arg_key><arg_value>true</arg_value></tool_call>',
           call('{"units": "5", "at": {"x": 1}, "other": "true"}')),
    Answer("glm", None, "<tool_call>now</tool_call>\n<tool_call>now\n</tool_call>", call("{}", "now") * 2),
    Answer("glm", None, "<tool_call>now</tool_call><tool_call>now", call("{}", "now") * 2),
    Answer("glm", None, "<tool_call>now\n", [Content("<tool_call>now\n")], is_cut=True),
    Answer("glm", None, GLM.format("a").partition("5")[0], call('{"city": "a", "days": '), is_cut=True),
    Answer("glm", None, GLM.format("a").replace("</arg_value>", ""), call('{"city": "a", "days": 5}')),
    Answer("glm", None, GLM.format("a").replace("</arg_key>", ""), call('{"city": "a", "days": 5}')),
    Answer("glm", None, GLM.format("a").replace("<arg_value>", "<arg_value>" * 2).replace("</tool_call>", ""),
           call('{"city": "a", "days": 5}')),
    Answer("glm", None, GLM.format("a").replace("</arg_value>", "</arg_value>So", 1) + "</tool_call> !",
           [*call('{"city": "a", "days": 5}'), Content("So !")]),
    Answer("glm", None, GLM.format("a").replace("<arg_value>a</arg_value>", ""),
           [*call('{"days": 5}'), Content("city")]),
    Answer("glm", None, "The <tool_call> tag of two words</tool_call>",
           [Content("The <tool_call> tag of two words</tool_call>")]),
    Answer("glm", None, '<tool_call>{"name": "now"}</tool_call>',
           [Content('<tool_call>{"name": "now"}</tool_call>')]),
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
    Answer("harmony", None, "<|channel|>analysis hm<|end|><|start|>assistant<|channel|>final<|message|>b",
           [Content("<|channel|>analysis hm<|end|>b")]),
    Answer("harmony", None, 'a<|end|><|channel|>final to=functions.now<|message|>{"a": {1}<|call|> b',
           [Content("a<|end|>"), *call('{"a": {}}', "now"), Content("b")]),
    Answer("harmony", None, "<|channel|>commentary to=functions.now<|message|>no<|call|>",
           [Content("<|channel|>commentary to=functions.now<|message|>no<|call|>")]),
]  # fmt: skip
