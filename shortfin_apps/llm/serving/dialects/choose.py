"""Lists the dialects by name, and chooses a model's dialect by texts in its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from shortfin_apps.llm.serving.dialects.dialect import Dialect, ReasoningDialect, ToolDialect
from shortfin_apps.llm.serving.dialects.glm import Glm
from shortfin_apps.llm.serving.dialects.harmony import Harmony
from shortfin_apps.llm.serving.dialects.json_dialects import Granite, Hermes, Llama3, Mistral, SmolLM
from shortfin_apps.llm.serving.dialects.qwen3_coder import Qwen3Coder
from shortfin_apps.llm.serving.dialects.thoughts import MISTRAL_REASONING, THINK, GraniteReasoning

TOOL_DIALECTS: Mapping[str, ToolDialect] = {
    "hermes": Hermes(),
    "qwen3-coder": Qwen3Coder(),
    "glm": Glm(),
    "llama3": Llama3(),
    "mistral": Mistral(),
    "granite": Granite(),
    "smollm": SmolLM(),
    "harmony": Harmony(),
}
REASONING_DIALECTS: Mapping[str, ReasoningDialect] = {
    "think": THINK,
    "mistral": MISTRAL_REASONING,
    "granite": GraniteReasoning(),
    "harmony": Harmony(),
}
# "auto": choose by the chat template; "none": leave answers unparsed.
ToolParser = Literal[
    "auto", "none", "hermes", "qwen3-coder", "glm", "llama3", "mistral", "granite", "smollm", "harmony"
]
ReasoningParser = Literal["auto", "none", "think", "mistral", "granite", "harmony"]
Signs = tuple[tuple[str, tuple[str, ...]], ...]

# The first dialect with all its texts in the chat template is chosen.
_TOOL_SIGNS: Signs = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("mistral", ("[TOOL_CALLS]", "tools")),
    ("qwen3-coder", ("<function=", "<parameter=", "tools")),
    ("glm", ("<arg_key>", "<arg_value>", "tools")),
    ("granite", ("<|tool_call|>", "tools")),
    ("hermes", ("<tool_call>", "tools")),
    ("llama3", ("<|start_header_id|>", '"parameters": ', "tools")),
)
_REASONING_SIGNS: Signs = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("mistral", ("[THINK]",)),
    ("think", ("</think>",)),
    ("granite", ("Here is my thought process:",)),
)


def choose_dialect(template: str, tools: ToolParser = "auto", reasoning: ReasoningParser = "auto") -> Dialect:
    """Return a model's dialect. `template`: its chat template, which decides where a parser is "auto"."""
    tool_name = _name(tools, template, _TOOL_SIGNS)
    reasoning_name = _name(reasoning, template, _REASONING_SIGNS)
    return Dialect(
        tools=None if tool_name is None else TOOL_DIALECTS[tool_name],
        reasoning=None if reasoning_name is None else REASONING_DIALECTS[reasoning_name],
    )


def description(dialect: Dialect) -> str:
    """Describe a dialect by the names of its two parsers."""
    tools = next((name for name, each in TOOL_DIALECTS.items() if each is dialect.tools), "none")
    reasoning = next((name for name, each in REASONING_DIALECTS.items() if each is dialect.reasoning), "none")
    return f"parser of tool calls: {tools}; of reasoning: {reasoning}"


def _name(given: str, template: str, signs: Signs) -> str | None:
    match given:
        case "none":
            return None
        case "auto":
            return next((name for name, texts in signs if all(text in template for text in texts)), None)
        case _:
            return given
