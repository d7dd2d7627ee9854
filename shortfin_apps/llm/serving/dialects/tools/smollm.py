"""SmolLM2: `<tool_call>[{"name": "f", "arguments": {}}]</tool_call>`. SmolLM3 uses the Hermes format."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.serving.dialects.dialect import Function
from shortfin_apps.llm.serving.dialects.json_calls import call_of
from shortfin_apps.llm.serving.dialects.lark import Lark, repeated
from shortfin_apps.llm.serving.dialects.tools.hermes import BEGIN, END, Hermes


class SmolLM(Hermes):
    """Implements ToolDialect."""

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return f"{lark.literal(BEGIN)} {_rest(lark, functions, most)}"

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return lark.text_with([BEGIN], _rest(lark, functions, most))


def _rest(lark: Lark, functions: Sequence[Function], most: int) -> str:
    """Returns an expression of calls after their begin tag."""
    calls = repeated(call_of(lark, functions), lark.literal(", "), most)
    return f"{lark.literal('[')} {calls} {lark.literal(']' + END)}"
