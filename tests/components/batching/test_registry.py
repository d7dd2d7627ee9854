from __future__ import annotations

import pytest

from shortfin_apps.llm.components.batching import BATCH_MODES
from shortfin_apps.llm.components.batching.modes.default import DefaultMode
from shortfin_apps.llm.components.batching.modes.extend_attention import ExtendAttentionMode
from tests.components.batching.modes.mode_inputs import ALL_ENTRIES, running
from tests.components.fake_device import fake_config


def test_modes_by_name() -> None:
    made = {name: type(options().make(fake_config(), ALL_ENTRIES)) for name, options in BATCH_MODES.items()}
    assert made == {"default": DefaultMode, "extend-attention": ExtendAttentionMode}


@pytest.mark.parametrize("name", BATCH_MODES)
def test_token_counts_are_rounded_up_to_whole_pages(name: str) -> None:
    options = BATCH_MODES[name](chunk_tokens=9, token_budget=30)
    mode = options.make(fake_config(stride=16), ALL_ENTRIES)
    batch = mode.next_batch([running("a", 300), running("b", 300)])
    assert batch is not None
    assert sum(len(task.input_tokens) for task in batch.tasks) == 32
