from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.buckets import FEW_ROWS, Buckets, Shape
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.runtime.device import EntrySignature, TensorType
from shortfin_apps.llm.contract.abi import EntryFamily, Layout
from shortfin_apps.llm.contract.errors import ArtifactError
from tests.components.engine_fixture import call


def buckets(*names: str, extend_rank: int = 1, has_prefill_position: bool = True) -> Buckets:
    tokens = TensorType((None,) * extend_rank, np.dtype(np.int64))
    entries = {name: EntrySignature(name, (tokens,), None) for name in names}
    return Buckets(entries, 4, has_prefill_position=has_prefill_position)


def task(num_tokens: int, start: int) -> LlmTaskInput:
    end = start + num_tokens
    pages = list(range(1, 1 - (-end // 4)))
    return LlmTaskInput(Request(call("r", [1])), [1] * num_tokens, start, end, pages)


def prefill(*tasks: LlmTaskInput) -> Batch:
    return Batch(EntryFamily.PREFILL, tasks)


def test_a_batch_is_padded_to_the_nearest_bucket() -> None:
    made = buckets("decode_bs2", "decode_bs8", "prefill_bs1", "prefill_bs4", "other")
    one = task(1, 4)
    assert made.nearest(Batch(EntryFamily.DECODE, (one,))) == Shape("decode_bs2", Layout.DECODE, 2, 2, 2)
    assert made.nearest(Batch(EntryFamily.DECODE, (one,) * 3)) == Shape("decode_bs8", Layout.DECODE, 8, 8, 2)
    assert made.nearest(prefill(one, one)) == Shape("prefill_bs4", Layout.PREFILL, 4, 16, 2)


def test_a_sample_is_the_nearest_that_holds_the_rows_or_the_largest() -> None:
    made = buckets("decode_bs1", "prefill_bs1", "sample_bs2", "sample_bs8")
    assert made.draws_rows
    assert [made.row_shape(Layout.SAMPLE, rows).rows for rows in (1, 2, 3, 8, 9)] == [2, 2, 8, 8, 8]
    assert made.row_shape(Layout.SAMPLE, 9) == Shape("sample_bs8", Layout.SAMPLE, 8, 0, 0)
    assert made.row_shape(Layout.SAMPLE, 9) in made.smallest_shapes()


def test_rows_are_adjusted_by_entries_of_their_own() -> None:
    made = buckets("decode_bs1", "prefill_bs1", "sample_bs2", "adjusted_sample_bs2", "adjusted_sample_bs4")
    assert [made.row_shape(Layout.ADJUSTED_SAMPLE, rows).rows for rows in (1, 3, 5)] == [2, 4, 4]
    assert made.row_shape(Layout.ADJUSTED_SAMPLE, 9) == Shape(
        "adjusted_sample_bs4", Layout.ADJUSTED_SAMPLE, 4, 0, 0
    )
    assert made.row_shape(Layout.ADJUSTED_SAMPLE, 9) in made.smallest_shapes()
    assert made.draws_adjusted_rows
    assert not buckets("decode_bs1", "prefill_bs1", "sample_bs2").draws_adjusted_rows
    assert not buckets("decode_bs1", "prefill_bs1").draws_rows


def test_logprobs_are_computed_by_entries_of_their_own() -> None:
    made = buckets("decode_bs1", "prefill_bs1", "logprobs_bs2", "logprobs_bs8")
    assert made.computes_logprobs
    assert not made.draws_rows
    assert [made.row_shape(Layout.LOGPROBS, rows).rows for rows in (1, 3, 9)] == [2, 8, 8]
    assert made.row_shape(Layout.LOGPROBS, 9) in made.smallest_shapes()
    assert not buckets("decode_bs1", "prefill_bs1", "sample_bs2").computes_logprobs


def test_a_decode_loop_is_the_nearest_that_holds_the_rows() -> None:
    made = buckets("decode_bs1", "prefill_bs1", "decode_loop_bs2", "decode_loop_bs8")
    one = task(1, 12)
    for count, rows in ((1, 2), (3, 8)):
        shape = Shape(f"decode_loop_bs{rows}", Layout.LOOP, rows, rows, 4)
        assert made.nearest(Batch(EntryFamily.DECODE, (one,) * count), draws=True) == shape
    assert made.can_run_ahead
    assert not buckets("decode_bs1", "prefill_bs1").can_run_ahead
    assert not buckets("decode_bs4", "prefill_bs1", "decode_loop_bs2").can_run_ahead


def test_a_static_entry_of_the_exact_length_is_preferred() -> None:
    made = buckets("decode_bs1", "prefill_bs1", "prefill_bs1_s8")
    assert made.nearest(prefill(task(7, 0))).entry == "prefill_bs1_s8"
    assert made.nearest(prefill(task(3, 0))).entry == "prefill_bs1"


def test_without_a_dynamic_entry_a_chunk_is_padded_to_the_nearest_static_one() -> None:
    made = buckets("decode_bs1", "prefill_bs1_s8", "prefill_bs1_s16")
    assert made.nearest(prefill(task(9, 0))).entry == "prefill_bs1_s16"
    assert made.nearest(prefill(task(5, 0))).entry == "prefill_bs1_s8"


def test_a_short_chunk_behind_a_long_history_widens_the_block_table() -> None:
    made = buckets("decode_bs1", "prefill_bs2")
    assert made.nearest(prefill(task(16, 0), task(2, 40))).blocks == 10 + 4


def test_packed_tokens_take_the_nearest_bucket_or_the_dynamic_entry() -> None:
    made = buckets("decode_bs1", "prefill_bs1", "extend_t8", "extend_t16", "extend")
    assert made.has_extend
    mixed = (task(1, 5), task(6, 0))
    assert made.nearest(Batch(EntryFamily.EXTEND, mixed)) == Shape("extend_t8", Layout.PACKED, 2, 8, 2)
    assert made.nearest(Batch(EntryFamily.EXTEND, mixed * 2)) == Shape("extend_t16", Layout.PACKED, 4, 16, 2)
    assert made.nearest(Batch(EntryFamily.EXTEND, mixed * 3)) == Shape("extend", Layout.PACKED, 6, 21, 2)


@given(num_decodes=st.integers(1, 5), pages=st.integers(1, 5))
def test_decodes_with_a_chunk_have_the_shape_of_such_a_batch(num_decodes: int, pages: int) -> None:
    made = buckets("decode_bs1", "prefill_bs1", "extend_t8", "extend_t16", "extend")
    batch = Batch(EntryFamily.EXTEND, (*[task(1, 3)] * num_decodes, task(4 * pages, 0)))
    assert made.mixed_of(num_decodes, pages) == made.nearest(batch)
    assert buckets("decode_bs1", "prefill_bs1", "extend", extend_rank=2).mixed_of(num_decodes, pages) is None


def test_more_rows_than_an_extend_has_results_for_take_the_next() -> None:
    tokens, types = TensorType((None,), np.dtype(np.int64)), np.dtype(np.float32)
    results = {"extend_t8": (TensorType((2, 1, 3), types),), "extend": (TensorType((None, 1, 3), types),)}
    names = ("decode_bs1", "prefill_bs1", "extend_t8", "extend_t16", "extend")
    made = Buckets(
        {name: EntrySignature(name, (tokens,), results.get(name)) for name in names},
        4,
        has_prefill_position=True,
    )
    decodes = (task(1, 5),) * 3
    assert made.nearest(Batch(EntryFamily.EXTEND, decodes[:2])).entry == "extend_t8"
    assert made.nearest(Batch(EntryFamily.EXTEND, decodes)).entry == "extend_t16"


@given(
    decode_sizes=st.sets(st.integers(1, 12), min_size=1),
    extend_sizes=st.sets(st.integers(1, 12)),
    tasks=st.lists(st.builds(task, st.integers(1, 3), st.integers(0, 9)), min_size=1, max_size=12),
)
def test_packed_tokens_take_a_decode_if_they_are_decodes_and_it_computes_few_or_no_more_rows(
    decode_sizes: set[int], extend_sizes: set[int], tasks: list[LlmTaskInput]
) -> None:
    decodes, extends = ([f"decode_bs{n}" for n in decode_sizes], [f"extend_t{t}" for t in extend_sizes])
    made = buckets(*decodes, "prefill_bs1", *extends, "extend")
    total = sum(len(each.token_ids) for each in tasks)
    packed_tokens = min((t for t in extend_sizes if t >= total), default=total)
    fitting = [n for n in decode_sizes if total == len(tasks) <= n <= max(packed_tokens, FEW_ROWS)]
    shape = made.nearest(Batch(EntryFamily.EXTEND, tuple(tasks)))
    if fitting:
        assert shape == made.nearest(Batch(EntryFamily.DECODE, tuple(tasks)))
        assert shape.rows == min(fitting)
    else:
        assert (shape.layout, shape.rows, shape.tokens) == (Layout.PACKED, len(tasks), packed_tokens)


def test_tokens_of_one_request_are_no_decodes() -> None:
    """A `decode` computes its rows at once, so that none sees what another writes."""
    made = buckets("decode_bs2", "prefill_bs1", "extend")
    one = task(1, 4)
    proposed = LlmTaskInput.proposed(one, 1, 7)
    assert made.nearest(Batch(EntryFamily.EXTEND, (one, proposed))).entry == "extend"
    assert made.nearest(Batch(EntryFamily.EXTEND, (one, task(1, 5)))).entry == "decode_bs2"


def test_an_extend_entry_with_tokens_of_rank_two_is_padded() -> None:
    made = buckets("decode_bs1", "prefill_bs1", "extend", extend_rank=2)
    shape = made.nearest(Batch(EntryFamily.EXTEND, (task(1, 5), task(6, 0))))
    assert shape == Shape("extend", Layout.PREFILL, 2, 16, 3)
    assert made.nearest(Batch(EntryFamily.EXTEND, (task(1, 5),))).entry == "extend"


def test_static_extend_entries_alone_do_not_fit_every_batch() -> None:
    assert not buckets("decode_bs1", "prefill_bs1", "extend_t8").has_extend


@pytest.mark.parametrize("names", [("prefill_bs1",), ("decode_bs1",), ()])
def test_a_vmfb_without_the_entries_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ArtifactError, match="prefill_bsN or no decode_bsN"):
        buckets(*names)


def test_static_prefills_alone_do_not_take_any_length() -> None:
    assert buckets("decode_bs1", "prefill_bs1", "prefill_bs4", "prefill_bs4_s8").takes_any_chunk
    assert not buckets("decode_bs1", "prefill_bs1_s8").takes_any_chunk
    assert not buckets("decode_bs1", "prefill_bs1", "prefill_bs4_s8").takes_any_chunk
