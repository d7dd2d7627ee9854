from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from shortfin_apps.llm.components.batching import make_mode
from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.components.batching.mode import BatchMode, BatchSettings
from shortfin_apps.llm.components.batching.modes.default import DefaultMode
from shortfin_apps.llm.components.batching.prefill_chunks import PrefillChunks
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.errors import ArtifactError
from tests.components.batching.modes.mode_inputs import ALL_ENTRIES, Entries, running
from tests.components.fake_device import fake_config


def run_all(batching: BatchMode, requests: Sequence[Request]) -> list[Batch]:
    """The invocations until all tokens are computed."""
    batches = []
    while left := [r for r in requests if r.num_unplanned]:
        batch = batching.next_batch(left)
        assert batch is not None
        for task in batch.tasks:
            task.request.num_computed = task.request.num_planned = task.seq_len
        batches.append(batch)
    return batches


def mode(chunk: int | None = 128, decode: int = 8, ratio: int = 1) -> DefaultMode:
    chunks = PrefillChunks(stride=16, chunk_tokens=chunk, row_buckets=(1, 4))
    return DefaultMode(chunks=chunks, max_decode_batch=decode, prefills_per_decode=ratio)


def test_a_last_chunk_that_fills_as_many_pages_runs_with_whole_chunks() -> None:
    """The design document's requests of 250 and 300 tokens: 122 and 128 tokens are both 8 pages, 44 are 3."""
    batches = run_all(mode(), [running("r1", 250), running("r2", 300)])
    spans = [[(task.start_position, task.seq_len) for task in batch.tasks] for batch in batches]
    assert spans == [[(0, 128), (0, 128)], [(128, 250), (128, 256)], [(256, 300)]]


def test_prefills_and_decodes_never_share_an_invocation_and_take_turns() -> None:
    long, decode = running("long", 400), running("decode", 40, computed=39)
    batching, families = mode(), []
    for _ in range(6):
        batch = batching.next_batch([long, decode])
        assert batch is not None
        assert {t.request.request_id for t in batch.tasks} in ({"long"}, {"decode"})
        families.append(batch.family)
    assert families == [EntryFamily.PREFILL, EntryFamily.DECODE] * 3


def test_that_many_prefills_run_for_each_decode() -> None:
    batching, families = mode(ratio=2), []
    requests = [running("long", 400), running("decode", 40, computed=39)]
    for _ in range(6):
        batch = batching.next_batch(requests)
        assert batch is not None
        families.append(batch.family)
    assert families == [EntryFamily.PREFILL, EntryFamily.PREFILL, EntryFamily.DECODE] * 2


def test_more_decodes_than_the_largest_bucket_rotate() -> None:
    requests = [running(str(i), 20, computed=19) for i in range(12)]
    batching, served = mode(decode=8), {r.request_id: 0 for r in requests}
    turn = count()
    for _ in range(6):
        batch = batching.next_batch(requests)
        assert batch is not None
        assert len(batch.tasks) == 8
        for task in batch.tasks:
            task.request.last_turn = next(turn)
            served[task.request.request_id] += 1
    assert set(served.values()) == {4}


def test_one_token_after_a_cached_prefix_is_a_decode() -> None:
    batch = mode().next_batch([running("r", 33, computed=32)])
    assert batch is not None
    assert batch.family is EntryFamily.DECODE


def test_a_one_token_prompt_is_a_prefill() -> None:
    batch = mode().next_batch([running("r", 1)])
    assert batch is not None
    assert batch.family is EntryFamily.PREFILL


def test_nothing_to_do() -> None:
    assert mode().next_batch([]) is None


def test_prompts_run_whole_when_the_model_has_no_start_positions() -> None:
    batch = mode(chunk=None).next_batch([running("r", 300)])
    assert batch is not None
    assert [len(t.token_ids) for t in batch.tasks] == [300]


def chunks(options: BatchSettings, entries: Entries = ALL_ENTRIES) -> list[int]:
    """Tokens in each invocation for a single prompt of 1024 tokens."""
    mode = make_mode(options, fake_config(stride=16), entries)
    return [len(batch.tasks[0].token_ids) for batch in run_all(mode, [running("r", 1024)])]


def test_a_chunk_length_is_kept_unless_a_budget_is_given_too() -> None:
    assert chunks(BatchSettings(batch_mode="default")) == [512] * 2
    assert chunks(BatchSettings(batch_mode="default", chunk_tokens=256)) == [256] * 4
    assert chunks(BatchSettings(batch_mode="default", chunk_tokens=128, token_budget=250)) == [256] * 4


def test_chunks_have_one_size_where_no_other_was_compiled() -> None:
    fixed_lengths = Entries(takes_any_chunk=False)
    assert chunks(BatchSettings(batch_mode="default", token_budget=256), fixed_lengths) == [128] * 8


def test_a_chunk_length_for_a_model_that_takes_whole_prompts_is_refused() -> None:
    with pytest.raises(ArtifactError, match="leave out `--chunk-tokens`"):
        make_mode(
            BatchSettings(batch_mode="default", chunk_tokens=16),
            fake_config(has_prefill_position=False),
            ALL_ENTRIES,
        )


def test_a_decode_leaves_what_a_prefill_might_take_while_requests_decode() -> None:
    batching = make_mode(BatchSettings(batch_mode="default", token_budget=64), fake_config(), ALL_ENTRIES)
    batch = batching.next_batch([running("a", 20, computed=19), running("b", 20, computed=19)])
    assert batch is not None
    assert batching.spare_tokens(batch) == 62
