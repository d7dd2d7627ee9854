from __future__ import annotations

import pytest

from shortfin_apps.llm.components.batching import BATCH_MODES, BatchOptions, make_mode
from shortfin_apps.llm.components.batching.modes.default import DefaultMode
from shortfin_apps.llm.errors import UnavailableError
from tests.components.fake_device import fake_config


def test_modes_by_name() -> None:
    assert list(BATCH_MODES) == ["default", "extend-attention"]
    assert isinstance(make_mode("default", fake_config(), BatchOptions()), DefaultMode)


def test_extend_attention_says_that_it_is_not_built_yet() -> None:
    with pytest.raises(UnavailableError, match="not built yet"):
        make_mode("extend-attention", fake_config(), BatchOptions())
