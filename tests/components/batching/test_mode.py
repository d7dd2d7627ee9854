from __future__ import annotations

import pytest

from shortfin_apps.llm.components.batching.modes.default import DefaultModeOptions
from tests.components.fake_device import fake_config

CONFIG = fake_config(stride=16)


def test_token_counts_are_rounded_up_to_whole_pages() -> None:
    options = DefaultModeOptions(chunk_tokens=9, token_budget=30, idle_budget=33)
    budget = options.budget_of(CONFIG, while_decoding=320, on_gpu=False)
    assert (options.chunk(CONFIG), budget.while_decoding, budget.idle) == (16, 32, 48)


@pytest.mark.parametrize(
    ("token_budget", "idle_budget", "expected"),
    [(None, None, (320, 512)), (64, None, (64, 64)), (None, 1024, (320, 1024)), (64, 128, (64, 128))],
)
def test_a_token_budget_is_the_default_of_the_idle_budget(
    token_budget: int | None, idle_budget: int | None, expected: tuple[int, int]
) -> None:
    options = DefaultModeOptions(token_budget=token_budget, idle_budget=idle_budget)
    budget = options.budget_of(CONFIG, while_decoding=320, on_gpu=False)
    assert (budget.while_decoding, budget.idle) == expected


def test_default_budgets_are_larger_on_gpus() -> None:
    budget = DefaultModeOptions().budget_of(CONFIG, while_decoding=320, on_gpu=True)
    assert (budget.while_decoding, budget.idle) == (512, 2048)
    budget = DefaultModeOptions().budget_of(CONFIG, while_decoding=640, on_gpu=True)
    assert (budget.while_decoding, budget.idle) == (640, 2048)
    budget = DefaultModeOptions(token_budget=64).budget_of(CONFIG, while_decoding=320, on_gpu=True)
    assert (budget.while_decoding, budget.idle) == (64, 64)
