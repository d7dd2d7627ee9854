from __future__ import annotations

from itertools import count

from shortfin_apps.llm.abi import EntryFamily
from shortfin_apps.llm.components.batching.modes.default import DefaultMode
from shortfin_apps.llm.components.batching.prefill_chunks import FixedChunks
from tests.components.batching.modes.running_requests import running


def mode(chunk: int | None = 128, decode: int = 8, ratio: int = 1) -> DefaultMode:
    chunks = FixedChunks(stride=16, chunk_tokens=chunk, row_buckets=(1, 4))
    return DefaultMode(chunks=chunks, max_decode_batch=decode, prefills_per_decode=ratio)


def test_chunks_of_the_design_documents_two_requests() -> None:
    spans = [
        [(t.start_position, t.seq_len) for t in mode().make_task_inputs(running("r", length))]
        for length in (250, 300)
    ]
    assert spans == [[(0, 128), (128, 250)], [(0, 128), (128, 256), (256, 300)]]


def test_a_last_chunk_that_fills_as_many_pages_counts_as_the_same_size() -> None:
    """So 250 + 300 tokens take 3 invocations: 122 and 128 tokens are 8 pages both, 44 are 3."""
    requests = [running("r1", 250), running("r2", 300)]
    batching, sizes = mode(), []
    while any(r.num_uncomputed for r in requests):
        batch = batching.next_batch([r for r in requests if r.num_uncomputed])
        assert batch is not None
        sizes.append([len(t.input_tokens) for t in batch.tasks])
        for task in batch.tasks:
            task.request.num_computed = task.seq_len
    assert sizes == [[128, 128], [122, 128], [44]]


def test_prefills_and_decodes_never_share_an_invocation_and_take_turns() -> None:
    long, stream = running("long", 400), running("stream", 40, computed=39)
    batching, families = mode(), []
    for _ in range(6):
        batch = batching.next_batch([long, stream])
        assert batch is not None
        assert {t.request.request_id for t in batch.tasks} in ({"long"}, {"stream"})
        families.append(batch.family)
    assert families == [EntryFamily.PREFILL, EntryFamily.DECODE] * 3


def test_a_ratio_lets_that_many_prefills_through_for_each_decode() -> None:
    batching, families = mode(ratio=2), []
    requests = [running("long", 400), running("stream", 40, computed=39)]
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


def test_one_token_on_a_cached_prefix_is_a_decode() -> None:
    batch = mode().next_batch([running("r", 33, computed=32)])
    assert batch is not None
    assert batch.family is EntryFamily.DECODE


def test_a_one_token_prompt_is_a_prefill() -> None:
    batch = mode().next_batch([running("r", 1)])
    assert batch is not None
    assert batch.family is EntryFamily.PREFILL


def test_nothing_to_do() -> None:
    assert mode().next_batch([]) is None


def test_whole_prompts_when_the_model_has_no_start_positions() -> None:
    batch = mode(chunk=None).next_batch([running("r", 300)])
    assert batch is not None
    assert [len(t.input_tokens) for t in batch.tasks] == [300]
