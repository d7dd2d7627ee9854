"""Dialects: how model families write thoughts and tool calls. One dialect per file, registered by name."""

from __future__ import annotations

from collections.abc import Mapping

from shortfin_apps.llm.serving.dialects.dialect import ReasoningDialect, ToolDialect
from shortfin_apps.llm.serving.dialects.reasoning.granite import GraniteReasoning
from shortfin_apps.llm.serving.dialects.reasoning.mistral import MISTRAL_REASONING
from shortfin_apps.llm.serving.dialects.reasoning.think import THINK
from shortfin_apps.llm.serving.dialects.tools.granite import Granite
from shortfin_apps.llm.serving.dialects.tools.harmony import Harmony
from shortfin_apps.llm.serving.dialects.tools.hermes import Hermes
from shortfin_apps.llm.serving.dialects.tools.llama3 import Llama3
from shortfin_apps.llm.serving.dialects.tools.mistral import Mistral
from shortfin_apps.llm.serving.dialects.tools.qwen3_coder import Qwen3Coder
from shortfin_apps.llm.serving.dialects.tools.smollm import SmolLM

TOOL_DIALECTS: Mapping[str, ToolDialect] = {
    "hermes": Hermes(),
    "qwen3-coder": Qwen3Coder(),
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
