"""A workload's requests and clients are divided among the processes that generate it."""

from __future__ import annotations

import pytest

from bench.gpu.serving import parts, workloads


@pytest.mark.parametrize("count", [1, 2, 8])
def test_parts_have_all_requests_and_clients(count: int) -> None:
    for whole in workloads(64):
        divided = parts(whole, count)
        assert len(divided) == count
        assert sorted(n for part in divided for n in part.prompt_tokens) == sorted(whole.prompt_tokens)
        assert sum(part.concurrency for part in divided) == whole.concurrency


def test_parts_of_a_mixed_workload_have_short_and_long_prompts() -> None:
    _, mixed = workloads(256)
    for part in parts(mixed, 8):
        assert max(part.prompt_tokens) - min(part.prompt_tokens) > 400
