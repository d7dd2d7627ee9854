from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.batching.token_budget import LIGHT_BACKLOG_TOKENS, TokenBudget

BUDGET = TokenBudget(while_decoding=192, idle=512, context_span=1024)


@pytest.mark.parametrize(("num_decodes", "tokens"), [(1, 192), (9, 192), (0, 512)])
def test_the_budget_depends_on_whether_requests_decode(num_decodes: int, tokens: int) -> None:
    assert BUDGET.tokens(num_decodes, 100) == tokens


@pytest.mark.parametrize(
    ("backlog", "tokens"), [(1, 36), (1024, 36), (2048, 68), (4096, 132), (6144, 192), (1 << 20, 192)]
)
def test_a_least_budget_grows_with_the_backlog_up_to_the_whole_budget(backlog: int, tokens: int) -> None:
    """32 tokens of prefill, and four decodes."""
    tuned = replace(BUDGET, least=32)
    assert tuned.tokens(4, backlog) == tokens
    assert tuned.tokens(0, backlog) == 512


@given(least=st.integers(1, 400), decodes=st.integers(0, 64), backlog=st.integers(0, 1 << 20))
def test_a_least_budget_never_raises_what_there_was(least: int, decodes: int, backlog: int) -> None:
    tuned = replace(BUDGET, least=least).tokens(decodes, backlog)
    before = BUDGET.tokens(decodes, backlog)
    assert tuned <= before
    if backlog > LIGHT_BACKLOG_TOKENS * BUDGET.while_decoding:
        assert tuned == before


@pytest.mark.parametrize(("context", "cost"), [(0, 1), (512, 1.5), (1024, 2), (3072, 4)])
def test_a_page_costs_more_in_a_longer_context_only_while_requests_decode(context: int, cost: float) -> None:
    assert BUDGET.page_cost(context, has_decodes=True) == cost
    assert BUDGET.page_cost(context, has_decodes=False) == 1
