from __future__ import annotations

import pytest

from shortfin_apps.llm.components.batching.token_budget import TokenBudget

BUDGET = TokenBudget(while_decoding=192, alone=512, context_span=1024)


def test_streams_decide_which_budget_holds() -> None:
    assert (BUDGET.tokens(has_decodes=True), BUDGET.tokens(has_decodes=False)) == (192, 512)


@pytest.mark.parametrize(("context", "cost"), [(0, 1), (512, 1.5), (1024, 2), (3072, 4)])
def test_a_page_costs_by_its_context_beside_streams_alone(context: int, cost: float) -> None:
    assert BUDGET.page_cost(context, has_decodes=True) == cost
    assert BUDGET.page_cost(context, has_decodes=False) == 1
