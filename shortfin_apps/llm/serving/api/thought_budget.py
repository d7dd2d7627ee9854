"""Reads a request's budget of reasoning tokens, and adds it to the grammar of the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from shortfin_apps.llm.components.grammar.source import (
    ANY_TOKENS,
    AskedGrammar,
    GrammarSource,
    asked_grammar,
)
from shortfin_apps.llm.components.grammar.thought_budget import ThoughtBudget
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.sampling import first_given
from shortfin_apps.llm.serving.api.schema import BUDGET_FIELDS, SamplingFields
from shortfin_apps.llm.serving.dialects.dialect import ReasoningDialect

NO_BUDGET = -1  # vLLM's and llama.cpp's value for reasoning of any length
MAX_BUDGET = 2**31 - 1  # above the context of all models


class AskedBudget(NamedTuple):
    """A budget of tokens for the model's `reasoning`. `param`: the request field that holds it."""

    param: str
    max_tokens: int
    reasoning: ReasoningDialect

    def on(self, grammar: AskedGrammar) -> AskedGrammar:
        """Return the grammar with this budget. It must allow reasoning at the beginning of the answer."""
        return AskedGrammar(grammar.param, [partial(self._limited, make) for make in grammar.sources])

    def on_any_text(self) -> AskedGrammar:
        """Return a grammar of any answer with this budget."""
        return self.on(AskedGrammar(self.param, [lambda prompt: ANY_TOKENS]))

    def _limited(self, make: Callable[[str], GrammarSource], prompt: str) -> GrammarSource:
        source, marks = make(prompt), self.reasoning.thought_marks(prompt)
        return source if marks is None else replace(source, budget=ThoughtBudget(self.max_tokens, *marks))


def asked_budget(
    fields: SamplingFields, reasoning: ReasoningDialect | None, prefix: str = ""
) -> AskedBudget | None:
    """Return the budget in a request's fields; None without one. `prefix` precedes the fields' names.

    Raises InvalidRequestError for a value out of range, for fields that disagree, and for a model whose
    reasoning has no format that is known here.
    """
    name, max_tokens = first_given(fields, *BUDGET_FIELDS, prefix=prefix)
    if max_tokens in (None, NO_BUDGET):
        return None
    param = prefix + name
    if not 0 <= max_tokens <= MAX_BUDGET:
        raise InvalidRequestError(f"`{param}` must lie in [0, {MAX_BUDGET}], or be -1 (no budget)", param)
    if reasoning is None:
        raise InvalidRequestError(
            f"`{param}`: this model's chat template has no form of reasoning that is known here; serve it"
            " with `--reasoning-parser` and the form that it was trained on, or leave the field out",
            param,
        )
    return AskedBudget(param, max_tokens, reasoning)


def grammar_of_prompt(
    fields: SamplingFields, reasoning: ReasoningDialect | None, prefix: str = ""
) -> AskedGrammar | None:
    """Return the grammar in the fields of a request without messages, or one with their budget; else None.

    A grammar applies from the first token, so there is no reasoning before it. Raises InvalidRequestError
    like `named_source` and `asked_budget`, and for a budget where an answer consists of messages.
    """
    grammar, budget = asked_grammar(fields.grammar_fields(), prefix), asked_budget(fields, reasoning, prefix)
    if grammar is not None or budget is None:
        return grammar
    if budget.reasoning.content_begin:
        raise InvalidRequestError(
            f"`{budget.param}`: this model reasons in messages, which are limited on chat routes only;"
            " use /v1/chat/completions, or leave the field out",
            budget.param,
        )
    return budget.on_any_text()
