from __future__ import annotations

import pytest

from shortfin_apps.llm.components.batching import BATCH_MODES, BatchOptions, make_mode
from shortfin_apps.llm.components.batching.modes.default import DefaultMode
from shortfin_apps.llm.components.batching.modes.extend_attention import ExtendAttentionMode
from shortfin_apps.llm.components.kvcache import make_cache
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.errors import ArtifactError
from tests.components.batching.modes.running_requests import running
from tests.components.engine_fixture import call
from tests.components.fake_device import fake_config


def test_modes_by_name() -> None:
    assert list(BATCH_MODES) == ["default", "extend-attention"]
    assert isinstance(make_mode("default", fake_config(), BatchOptions()), DefaultMode)

    assert isinstance(make_mode("extend-attention", fake_config(), BatchOptions()), ExtendAttentionMode)


@pytest.mark.parametrize("name", list(BATCH_MODES))
def test_token_counts_are_rounded_up_to_whole_pages(name: str) -> None:
    options = BatchOptions(chunk_tokens=9, token_budget=15)
    cache = make_cache("none", 32, 4)
    request = Request(call("r", [1] * 30))
    lease = cache.acquire(request.tokens)
    assert cache.reserve(lease, 30)
    request.start(lease)
    tasks = make_mode(name, fake_config(), options).make_task_inputs(request)
    assert [len(task.input_tokens) for task in tasks] == [12, 12, 6]


def test_a_budget_without_room_for_a_decode_beside_a_page_is_refused() -> None:
    with pytest.raises(ArtifactError, match="`--token-budget 8` or more"):
        make_mode("extend-attention", fake_config(), BatchOptions(token_budget=4))
    make_mode("extend-attention", fake_config(), BatchOptions(token_budget=5))


def test_the_default_budget_holds_two_pages_of_any_size() -> None:
    assert isinstance(
        make_mode("extend-attention", fake_config(stride=512), BatchOptions()), ExtendAttentionMode
    )


def chunks(options: BatchOptions, length: int = 1024, *, any_chunk: bool = True) -> list[int]:
    """Tokens in each invocation of the default mode for one prompt with nobody else there."""
    batching = make_mode("default", fake_config(stride=16), options, any_chunk=any_chunk)
    request, sizes = running("r", length), []
    while request.num_uncomputed:
        batch = batching.next_batch([request])
        assert batch is not None
        sizes.append(len(batch.tasks[0].input_tokens))
        request.num_computed = batch.tasks[0].seq_len
    return sizes


def test_a_chunk_length_that_was_asked_for_is_kept_unless_a_budget_was_too() -> None:
    assert chunks(BatchOptions()) == [512] * 2
    assert chunks(BatchOptions(chunk_tokens=256)) == [256] * 4
    assert chunks(BatchOptions(chunk_tokens=128, token_budget=250)) == [256] * 4
    assert chunks(BatchOptions(token_budget=64, idle_budget=600)) == [608, 416]


def test_chunks_have_one_size_where_no_other_was_compiled() -> None:
    assert chunks(BatchOptions(token_budget=256), any_chunk=False) == [128] * 8
