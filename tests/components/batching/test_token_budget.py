from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.batching.token_budget import (
    LIGHT_BACKLOG_TOKENS,
    MAX_LIGHT_DECODES,
    TokenBudget,
)

BUDGET = TokenBudget(while_decoding=192, idle=512, context_span=1024)


@pytest.mark.parametrize(("num_decodes", "tokens"), [(1, 192), (9, 192), (0, 512)])
def test_the_budget_depends_on_whether_requests_decode(num_decodes: int, tokens: int) -> None:
    assert BUDGET.tokens(num_decodes, 100) == tokens


@pytest.mark.parametrize(
    ("backlog", "tokens"), [(1, 32), (512, 32), (1024, 64), (2048, 128), (3072, 192), (1 << 20, 192)]
)
def test_a_least_budget_grows_with_the_backlog_up_to_the_whole_budget(backlog: int, tokens: int) -> None:
    """While four requests decode."""
    tuned = replace(BUDGET, least=32)
    assert tuned.tokens(4, backlog) == tokens
    assert tuned.tokens(0, backlog) == 512


@pytest.mark.parametrize(("num_decodes", "tokens"), [(1, 320), (2, 160), (4, 80), (8, 40), (9, 40), (64, 40)])
def test_the_fewer_requests_decode_the_more_a_backlog_gets(num_decodes: int, tokens: int) -> None:
    tuned = replace(BUDGET, least=40, while_decoding=512)
    assert tuned.tokens(num_decodes, 1024) == tokens


@given(least=st.integers(1, 400), decodes=st.integers(0, 64), backlog=st.integers(0, 1 << 20))
def test_a_least_budget_never_raises_what_there_was(least: int, decodes: int, backlog: int) -> None:
    tuned = replace(BUDGET, least=least).tokens(decodes, backlog)
    before = BUDGET.tokens(decodes, backlog)
    assert tuned <= before
    if backlog > LIGHT_BACKLOG_TOKENS * MAX_LIGHT_DECODES * BUDGET.while_decoding:
        assert tuned == before


@pytest.mark.parametrize(("context", "cost"), [(0, 1), (512, 1.5), (1024, 2), (3072, 4)])
def test_a_page_costs_more_in_a_longer_context_only_while_requests_decode(context: int, cost: float) -> None:
    assert BUDGET.page_cost(context, has_decodes=True) == cost
    assert BUDGET.page_cost(context, has_decodes=False) == 1
