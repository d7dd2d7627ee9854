from __future__ import annotations

import pytest

from shortfin_apps.llm.components.batching.token_budget import TokenBudget

BUDGET = TokenBudget(while_decoding=192, idle=512, context_span=1024)


@pytest.mark.parametrize(("has_decodes", "tokens"), [(True, 192), (False, 512)])
def test_the_budget_depends_on_whether_requests_decode(has_decodes: bool, tokens: int) -> None:
    assert BUDGET.of_invocation(has_decodes).tokens == tokens


@pytest.mark.parametrize(("context", "cost"), [(0, 1), (512, 1.5), (1024, 2), (3072, 4)])
def test_a_page_costs_more_in_a_longer_context_only_while_requests_decode(context: int, cost: float) -> None:
    assert BUDGET.of_invocation(has_decodes=True).page_cost(context) == cost
    assert BUDGET.of_invocation(has_decodes=False).page_cost(context) == 1
