from __future__ import annotations

import pytest

from shortfin_apps.llm.components.batching.mode import BatchSettings
from tests.components.fake_device import fake_config

CONFIG = fake_config(stride=16)


def test_token_counts_are_rounded_up_to_whole_pages() -> None:
    options = BatchSettings(chunk_tokens=9, token_budget=30)
    budget = options.budget(CONFIG, while_decoding=320, on_gpu=False)
    assert (options.chunk(CONFIG), budget.while_decoding, budget.idle) == (16, 32, 32)


@pytest.mark.parametrize(("token_budget", "expected"), [(None, (320, 512)), (64, (64, 64))])
def test_a_token_budget_holds_with_and_without_decodes(
    token_budget: int | None, expected: tuple[int, int]
) -> None:
    budget = BatchSettings(token_budget=token_budget).budget(CONFIG, while_decoding=320, on_gpu=False)
    assert (budget.while_decoding, budget.idle) == expected


def test_default_budgets_are_larger_on_gpus() -> None:
    budget = BatchSettings().budget(CONFIG, while_decoding=320, on_gpu=True)
    assert (budget.while_decoding, budget.idle) == (512, 2048)
    budget = BatchSettings().budget(CONFIG, while_decoding=640, on_gpu=True)
    assert (budget.while_decoding, budget.idle) == (640, 2048)
    budget = BatchSettings(token_budget=64).budget(CONFIG, while_decoding=320, on_gpu=True)
    assert (budget.while_decoding, budget.idle) == (64, 64)
