from __future__ import annotations

import pytest

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.tools.bench.workload import PRESETS, chosen_presets, custom_workloads


def test_presets_are_unchanged() -> None:
    shapes = {
        w.name: (w.concurrency, len(w.prompt_tokens), sum(w.prompt_tokens), w.output_tokens)
        for w in PRESETS.values()
    }
    assert shapes == {
        "W1": (1, 3, 384, 128),
        "W2": (8, 8, 1024, 128),
        "W3": (32, 32, 264 * 32, 64),
        "W4": (16, 16, 32 * 16, 32),
        "W5": (1, 1, 1024, 1),
    }
    assert PRESETS["W4"].shared_prefix_tokens == 512


def test_a_shared_prefix_is_measured_cold_then_warm() -> None:
    assert PRESETS["W4"].passes == ("W4c", "W4w")
    assert PRESETS["W1"].passes == ("W1",)


def test_presets_are_chosen_by_name() -> None:
    assert [w.name for w in chosen_presets("w3, W1,W3")] == ["W3", "W1"]
    assert [w.name for w in chosen_presets("all")] == ["W1", "W2", "W3", "W4", "W5"]
    with pytest.raises(InvalidRequestError, match="no preset 'W9'"):
        chosen_presets("W1,W9")


def test_a_custom_run_has_a_workload_per_concurrency() -> None:
    one, four = custom_workloads(100, 10, [1, 4], None)
    assert (one.name, one.prompt_tokens, one.concurrency) == ("C1", (100, 100), 1)
    assert (four.name, len(four.prompt_tokens), four.output_tokens) == ("C4", 8, 10)
    (exact,) = custom_workloads(100, 10, [4], 5, shared_prefix_tokens=64)
    assert len(exact.prompt_tokens) == 5
    assert exact.passes == ("C4c", "C4w")
