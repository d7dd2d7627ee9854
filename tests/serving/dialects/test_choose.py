from __future__ import annotations

from typing import get_args

import pytest

from shortfin_apps.llm.serving.dialects.choose import (
    REASONING_DIALECTS,
    TOOL_DIALECTS,
    ReasoningParser,
    ToolParser,
    choose_dialect,
    description,
)

# What templates of these families have.
TEMPLATES = {
    "Qwen 2.5": ("{% if tools %}<tool_call></tool_call>{% endif %}<|im_start|>", "hermes", "none"),
    "Qwen 3": ("{% if tools %}<tool_call>{% endif %}{{ content.split('</think>') }}", "hermes", "think"),
    "Qwen3-Coder": ("{% if tools %}<tool_call><function=x><parameter=y>{% endif %}", "qwen3-coder", "none"),
    "GLM-4.5": (
        "{% if tools %}<tool_call><arg_key><arg_value>{% endif %}{{ content.split('</think>') }}",
        "glm",
        "think",
    ),
    "Llama 3": ("{% if tools %}{{ '\"parameters\": ' }}{% endif %}<|start_header_id|>", "llama3", "none"),
    "R1 of Llama": ("<|begin_of_sentence|>{{ content.split('</think>') }}", "none", "think"),
    "Mistral": ("{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]{% endif %}", "mistral", "none"),
    "Magistral": ("{% if tools %}[TOOL_CALLS]{% endif %}[THINK][/THINK]", "mistral", "mistral"),
    "Granite 3.2": (
        "{% if tools %}<|tool_call|>{% endif %}Here is my thought process: <tool_call>",
        "granite",
        "granite",
    ),
    "gpt-oss": (
        "{% if tools %}{% endif %}<|start|>assistant<|channel|>final<|message|>",
        "harmony",
        "harmony",
    ),
    "SmolLM2": ("<|im_start|>{{ message.content }}", "none", "none"),
    "none": ("", "none", "none"),
}


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_tells_how_its_model_writes(template: str, tools: str, reasoning: str) -> None:
    dialect = choose_dialect(template)
    assert dialect.tools is TOOL_DIALECTS.get(tools)
    assert dialect.reasoning is REASONING_DIALECTS.get(reasoning)
    assert description(dialect) == f"parser of tool calls: {tools}; of reasoning: {reasoning}"


def test_a_given_name_counts() -> None:
    template, _, _ = TEMPLATES["Qwen 3"]
    dialect = choose_dialect(template, "llama3", "none")
    assert (dialect.tools, dialect.reasoning) == (TOOL_DIALECTS["llama3"], None)
    assert dialect.marks == TOOL_DIALECTS["llama3"].marks


def test_every_dialect_can_be_given() -> None:
    assert set(get_args(ToolParser)) == {"auto", "none", *TOOL_DIALECTS}
    assert set(get_args(ReasoningParser)) == {"auto", "none", *REASONING_DIALECTS}
