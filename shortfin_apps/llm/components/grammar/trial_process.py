"""A process that compiles grammars on trial, each in a worker that is killed at its limits.

    python -m shortfin_apps.llm.components.grammar.trial_process FD LIMITS EOS_TOKEN_IDS < tokenizer.json

Any client can send a grammar, and the library cannot be interrupted. Therefore this process reads the
tokenizer once and forks workers; see `limited_process.py`. A work item is a grammar; its result is the reason
why the grammar is unusable, or "" if the grammar compiled.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import partial

from llguidance import LLTokenizer

from shortfin_apps.llm.components.grammar.compiled import STACK_BYTES, UnusableGrammar, compiled
from shortfin_apps.llm.components.grammar.source import GrammarSource
from shortfin_apps.llm.limited_process import Limits, serve

MAX_REASON_CHARS = 1_000
NICENESS = 5  # running requests take precedence over compiling grammars


@dataclass(frozen=True, slots=True)
class TrialLimits(Limits):
    """Limits per grammar; the memory limit does not include the tokenizer's memory."""

    cpu_s: float = 2.0
    wall_s: float = 4.0


def main() -> None:
    os.nice(NICENESS)
    control_fd, limits, eos_token_ids = map(json.loads, sys.argv[1:])
    tokenizer = LLTokenizer(sys.stdin.buffer.read().decode(), eos_token=eos_token_ids)
    serve(control_fd, Limits(*limits), lambda: partial(_problem, tokenizer), STACK_BYTES)


def _problem(tokenizer: LLTokenizer, line: bytes) -> str:
    try:
        compiled(GrammarSource.from_json(line), tokenizer)
    except UnusableGrammar as unusable:
        return str(unusable)[:MAX_REASON_CHARS]
    except Exception as bug:  # a bug in the library; must not be mistaken for an exceeded limit
        return f"the library failed on it ({type(bug).__name__})"
    return ""


if __name__ == "__main__":
    main()
