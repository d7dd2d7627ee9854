"""Magistral's thoughts, delimited by two special tokens."""

from __future__ import annotations

from shortfin_apps.llm.serving.dialects.reasoning.think import TaggedReasoning

MISTRAL_REASONING = TaggedReasoning("[THINK]", "[/THINK]")
