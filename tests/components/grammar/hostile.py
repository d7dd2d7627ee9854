"""A grammar that asks for more than there is, and limits under which it is never refused."""

from __future__ import annotations

from shortfin_apps.llm.components.grammar.source import schema_source
from shortfin_apps.llm.components.grammar.trial_process import TrialLimits

_PATTERNS = [{"type": "string", "pattern": f".*a.{{{length}}}b.*"} for length in range(20)]
NEVER_COMPILED = schema_source({"allOf": _PATTERNS})  # the states of an automaton double with each pattern
UNLIMITED = TrialLimits(cpu_s=1e3, wall_s=1e3)
