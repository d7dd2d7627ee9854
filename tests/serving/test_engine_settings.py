"""What settings mean that the device decides."""

from __future__ import annotations

import pytest

from shortfin_apps.llm.serving.engine_settings import EngineSettings


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cpu", None, 131_072),
        ("hip", None, 1_048_576),
        ("cuda:sm_90", None, 1_048_576),
        ("cpu", 7, 7),
        ("hip:gfx942", 7, 7),
    ],
)
def test_gpus_queue_more_prompt_tokens(device: str, given: int | None, expected: int) -> None:
    assert EngineSettings(device=device, max_queue_tokens=given).queued_tokens == expected
