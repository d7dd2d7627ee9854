from __future__ import annotations

import pytest

from shortfin_apps.llm.components.grammar import refusals
from shortfin_apps.llm.components.grammar.compiled import UnusableGrammar
from shortfin_apps.llm.components.grammar.refusals import OVER_LIMITS_S, Refusals
from shortfin_apps.llm.components.grammar.source import GrammarKind, GrammarSource, schema_source
from shortfin_apps.llm.components.grammar.trials import OverLimitsError


def is_refused(refused: Refusals, source: GrammarSource) -> bool:
    try:
        refused.check(source)
    except UnusableGrammar as unusable:
        return str(unusable) == f"reason of {source.text}"
    return False


def source_of(text: str) -> GrammarSource:
    return GrammarSource(GrammarKind.REGEX, text)


def refuse(refused: Refusals, text: str, kind: type[UnusableGrammar] = UnusableGrammar) -> None:
    refused.add(source_of(text), kind(f"reason of {text}"))


def test_a_refusal_is_of_the_same_content_alone() -> None:
    refused = Refusals()
    refuse(refused, "{}")
    assert is_refused(refused, source_of("{}"))
    assert not is_refused(refused, source_of("{} "))
    assert not is_refused(refused, schema_source("{}"))


def test_only_the_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "MAX_REFUSALS", 3)
    refused = Refusals()
    for text in "abc":
        refuse(refused, text)
    assert is_refused(refused, source_of("a"))
    refuse(refused, "d")
    assert [text for text in "abcd" if is_refused(refused, source_of(text))] == ["a", "c", "d"]
    assert len(refused) == 3


def test_a_grammar_over_the_limits_is_tried_again_some_time_later() -> None:
    now_s = 0.0
    refused = Refusals(lambda: now_s)
    refuse(refused, "wrong")
    refuse(refused, "slow", OverLimitsError)
    now_s = OVER_LIMITS_S - 1
    assert is_refused(refused, source_of("slow"))
    now_s = OVER_LIMITS_S
    assert not is_refused(refused, source_of("slow"))
    assert is_refused(refused, source_of("wrong"))
    assert len(refused) == 1
