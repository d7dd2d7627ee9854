from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.runtime.check import check_program, check_vocabulary
from shortfin_apps.llm.components.runtime.device import DeviceBuffer, EntrySignature, Pending, TensorType
from shortfin_apps.llm.contract.config import ModelConfig, PagedKVCacheConfig
from shortfin_apps.llm.contract.errors import ArtifactError

I64 = np.dtype(np.int64)
F16 = np.dtype(np.float16)
F32, I32 = np.dtype(np.float32), np.dtype(np.int32)

CONFIG = ModelConfig(
    max_seq_len=128,
    transformer_block_count=2,
    attn_head_dim=4,
    prefill_batch_sizes=(1,),
    decode_batch_sizes=(2, 4),
    has_prefill_position=True,
    top_k=8,
    paged_kv_cache=PagedKVCacheConfig(
        attention_head_count_kv=1, block_seq_stride=16, device_block_count=8, kv_cache_dtype="float16"
    ),
)
CACHE = TensorType((None, 256), F16)
PREFILL = tuple(TensorType(shape, I64) for shape in ((1, None), (1,), (1,), (1, None)))
LOGITS = TensorType((None, 1, 64), F16)
VALUES, INDICES = TensorType((None, 1, 8), F16), TensorType((None, 1, 8), I64)


class Listed:
    """A program with entries that cannot be invoked."""

    def __init__(self, *entries: EntrySignature) -> None:
        self._entries = {entry.name: entry for entry in entries}

    @property
    def entries(self) -> Mapping[str, EntrySignature]:
        return self._entries

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Pending:
        raise NotImplementedError


def decode(size: int, *caches: TensorType) -> EntrySignature:
    arguments = tuple(TensorType(shape, I64) for shape in ((size, 1), (size,), (size,), (size, None)))
    return EntrySignature(f"decode_bs{size}", arguments + (caches or (CACHE,)), (VALUES, INDICES))


PREFILL_ENTRY = EntrySignature("prefill_bs1", (*PREFILL, CACHE), (VALUES, INDICES))
WHOLE = (PREFILL_ENTRY, decode(2), decode(4))


def test_a_matching_program_is_accepted() -> None:
    check_program(Listed(*WHOLE, EntrySignature("prefill_bs1_s128", None, None)), CONFIG)


def test_logits_may_be_a_third_result() -> None:
    three = dataclasses.replace(PREFILL_ENTRY, results=(VALUES, INDICES, LOGITS))
    check_program(Listed(three, *WHOLE[1:]), CONFIG)


def test_entries_without_reflection_data_are_accepted() -> None:
    names = ("prefill_bs1", "decode_bs2", "decode_bs4")
    check_program(Listed(*(EntrySignature(name, None, None) for name in names)), CONFIG)


def test_a_static_dimension_fits_a_dynamic_one() -> None:
    arguments = (TensorType((1, 32), I64), *PREFILL[1:], TensorType((8, 256), F16))
    check_program(Listed(dataclasses.replace(PREFILL_ENTRY, arguments=arguments), *WHOLE[1:]), CONFIG)


@pytest.mark.parametrize(
    ("entries", "changes", "says"),
    [
        (WHOLE[:2], {}, r"no entry `decode_bs4` \(it has decode_bs2, prefill_bs1\).*`decode_batch_sizes`"),
        ((), {}, r"no entry `prefill_bs1` \(it has nothing\).*`prefill_batch_sizes`"),
        (WHOLE, {"has_prefill_position": False}, "`prefill_bs1` takes 5 .*means 4; correct `has_prefill"),
        (WHOLE, {"top_k": None}, r"`prefill_bs1` returns 2 results .*`top_k`=None.* 1 \(logits\)"),
        (
            (dataclasses.replace(PREFILL_ENTRY, results=(LOGITS,)), *WHOLE[1:]),
            {},
            "`prefill_bs1` returns 1 results .*`top_k`=8.*at least 2",
        ),
        (WHOLE, {"top_k": 4}, "`prefill_bs1` returns 8 candidates .*`top_k` .* says 4"),
        (
            (PREFILL_ENTRY, decode(2), dataclasses.replace(decode(8), name="decode_bs4")),
            {},
            r"`decode_bs4` takes tensor<8x1xi64> as tokens .*means tensor<4x1xi64>",
        ),
        (
            (PREFILL_ENTRY, decode(2), decode(4, TensorType((None, 512), F16))),
            {},
            r"`decode_bs4` takes tensor<\?x512xf16> as cache slab .*tensor<\?x256xf16>.*page geometry",
        ),
        (
            (PREFILL_ENTRY, decode(2), decode(4, TensorType((None, 256), np.dtype(np.float32)))),
            {},
            r"`decode_bs4` takes tensor<\?x256xf32> .*`kv_cache_dtype`",
        ),
        (
            (PREFILL_ENTRY, decode(2), decode(4, CACHE, CACHE)),
            {},
            "`decode_bs4` takes 6 arguments .*1 cache slab.*means 5",
        ),
    ],
)
def test_a_mismatch_is_named(entries: tuple[EntrySignature, ...], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ArtifactError, match=says):
        check_program(Listed(*entries), dataclasses.replace(CONFIG, **changes))


def loop(*results: TensorType) -> EntrySignature:
    shapes = ((2,), (2,), (2,), (2, None), (6, 2), (None,))
    arguments = (*(TensorType(shape, I64) for shape in shapes), CACHE)
    return EntrySignature("decode_loop_bs2", arguments, results)


def test_a_decode_loop_returns_token_ids_before_what_a_decode_returns() -> None:
    check_program(Listed(*WHOLE, loop(TensorType((2,), I64), VALUES, INDICES)), CONFIG)
    with pytest.raises(ArtifactError, match=r"returns tensor<4xi64>.* where .* tensor<2xi64>; rebuild"):
        check_program(Listed(*WHOLE, loop(TensorType((4,), I64), VALUES, INDICES)), CONFIG)
    with pytest.raises(ArtifactError, match=r"`decode_loop_bs2` returns 0 results .* at least 2"):
        check_program(Listed(*WHOLE, loop(TensorType((2,), I64))), CONFIG)


def test_logprobs_return_terms_and_as_many_candidates_as_top_k() -> None:
    def logprobs(*results: TensorType) -> EntrySignature:
        return EntrySignature("logprobs_bs2", None, results)

    terms, values, indices = (
        *(TensorType((3, 2), I64), TensorType((2, 8), np.dtype(np.float32)), TensorType((2, 8), I64)),
    )
    check_program(Listed(*WHOLE, logprobs(terms, values, indices)), CONFIG)
    narrow = TensorType((2, 4), I64)
    for wrong in ((terms, values), (values, terms, indices), (terms, values, narrow), ()):
        with pytest.raises(ArtifactError, match=r"`logprobs_bs2` returns .* means tensor<3x2xi64>.*`top_k`"):
            check_program(Listed(*WHOLE, logprobs(*wrong)), CONFIG)


@given(stride=st.sampled_from([1, 8, 15, 17, 32, 64]))
def test_a_stride_that_does_not_match_the_page_size_is_named(stride: int) -> None:
    """The page size is given and matches the entries; only the stride differs."""
    cache = dataclasses.replace(
        CONFIG.paged_kv_cache, block_seq_stride=stride, paged_kv_block_size_elements_per_device=(256,)
    )
    with pytest.raises(
        ArtifactError, match=f"K and V of 16 tokens, .*`.*block_seq_stride` .* says {stride};"
    ):
        check_program(Listed(*WHOLE), dataclasses.replace(CONFIG, paged_kv_cache=cache))


@pytest.mark.parametrize("top_k", [8, None])
def test_the_width_of_the_logits_is_the_vocabulary_size(top_k: int | None) -> None:
    results = (LOGITS,) if top_k is None else (VALUES, INDICES, LOGITS)
    program = Listed(*(dataclasses.replace(entry, results=results) for entry in WHOLE))
    config = dataclasses.replace(CONFIG, top_k=top_k)
    check_program(program, config, tokenizer_vocab_size=64)
    with pytest.raises(ArtifactError, match="has 65 tokens but the model only 64"):
        check_program(program, config, tokenizer_vocab_size=65)


def test_without_declared_logits_any_tokenizer_fits() -> None:
    check_program(Listed(*WHOLE), CONFIG, tokenizer_vocab_size=65)


def test_a_tokenizer_may_be_smaller_than_the_vocabulary_but_not_larger() -> None:
    check_vocabulary(64, 63)
    check_vocabulary(64, 64)
    check_vocabulary(None, 65)
    check_vocabulary(64, None)
    with pytest.raises(ArtifactError, match="has 65 tokens but the model only 64"):
        check_vocabulary(64, 65)


PACKED = tuple(TensorType(shape, I64) for shape in (*4 * [(None,)], (None, None), (None,)))
EXTEND = EntrySignature("extend", (*PACKED, CACHE), (VALUES, INDICES))
BUCKET = EntrySignature("extend_t64", (TensorType((64,), I64), *PACKED[1:], CACHE), (VALUES, INDICES))


def test_matching_extend_entries_are_accepted() -> None:
    check_program(Listed(*WHOLE, EXTEND, BUCKET), CONFIG)
    check_program(Listed(*WHOLE, EntrySignature("extend", None, None)), CONFIG)
    padded = tuple(TensorType(shape, I64) for shape in ((None, None), (None,), (None,), (None, None)))
    check_program(Listed(*WHOLE, dataclasses.replace(EXTEND, arguments=(*padded, CACHE))), CONFIG)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (dataclasses.replace(EXTEND, arguments=PACKED), "`extend` takes 6 arguments .*means 7"),
        (
            dataclasses.replace(EXTEND, arguments=(*PACKED, TensorType((None, 128), F16))),
            r"`extend` takes tensor<\?x128xf16> as cache slab \(whole pages, stage 0\)",
        ),
        (
            dataclasses.replace(EXTEND, arguments=(TensorType((None,), F16), *PACKED[1:], CACHE)),
            r"`extend` takes tensor<\?xf16> as tokens .*means tensor<\?xi64>",
        ),
        (
            dataclasses.replace(BUCKET, name="extend_t128"),
            "`extend_t128` takes tensor<64xi64> as tokens .*means tensor<128xi64>",
        ),
        (dataclasses.replace(EXTEND, results=(LOGITS,)), "`extend` returns 1 results .*at least 2"),
    ],
)
def test_a_mismatch_of_an_extend_entry_is_named(entry: EntrySignature, says: str) -> None:
    with pytest.raises(ArtifactError, match=says):
        check_program(Listed(*WHOLE, entry), CONFIG)


def test_there_is_one_slab_per_pipeline_stage() -> None:
    cache = dataclasses.replace(CONFIG.paged_kv_cache, paged_kv_block_size_elements_per_device=(192, 64))
    config = dataclasses.replace(CONFIG, paged_kv_cache=cache)
    slabs = (TensorType((None, 192), F16), TensorType((None, 64), F16))
    staged = [
        dataclasses.replace(PREFILL_ENTRY, arguments=(*PREFILL, *slabs)),
        decode(2, *slabs),
        decode(4, *slabs),
    ]
    check_program(Listed(*staged), config)
    with pytest.raises(ArtifactError, match=r"takes 5 .*2 cache slab.*means 6"):
        check_program(Listed(*WHOLE), config)


def test_pages_of_states_are_not_of_keys_and_values() -> None:
    cache = dataclasses.replace(
        CONFIG.paged_kv_cache,
        paged_kv_block_size_elements_per_device=(256, 99),
        window_tokens=2,
        pools={"whole": 2, "state": 1},
    )
    config = dataclasses.replace(CONFIG, transformer_block_count=3, paged_kv_cache=cache)
    slabs = (TensorType((None, 256), F16), TensorType((None, 99), F16))
    staged = [
        dataclasses.replace(PREFILL_ENTRY, arguments=(*PREFILL, PREFILL[-1], *slabs)),
        *(decode(size, TensorType((size, None), I64), *slabs) for size in (2, 4)),
    ]
    check_program(Listed(*staged), config)
    extend = dataclasses.replace(EXTEND, arguments=(*PACKED[:5], *PACKED[4:], *slabs))  # of an earlier build
    check_program(Listed(*staged, extend), config)
    with pytest.raises(ArtifactError, match=r"`extend` takes 9 arguments .*means 10"):
        check_program(Listed(*staged, dataclasses.replace(extend, takes_followers=True)), config)
    arguments = (*PACKED[:5], PACKED[4], PACKED[1], PACKED[5], *slabs)
    extend = dataclasses.replace(extend, arguments=arguments, takes_followers=True)
    check_program(Listed(*staged, extend), config)
    cache = dataclasses.replace(cache, pools={"whole": 3, "state": 1})
    with pytest.raises(ArtifactError, match=r"K and V of 10\.6667 tokens"):
        check_program(Listed(*staged), dataclasses.replace(config, paged_kv_cache=cache))


def test_layers_with_windows_have_a_slab_and_a_table() -> None:
    cache = dataclasses.replace(
        CONFIG.paged_kv_cache,
        paged_kv_block_size_elements_per_device=(192, 64),
        window_tokens=5,
        pools={"whole": 1, "window": 1},
    )
    config = dataclasses.replace(CONFIG, paged_kv_cache=cache)
    slabs = (TensorType((None, 192), F16), TensorType((None, 64), F16))
    staged = [
        dataclasses.replace(PREFILL_ENTRY, arguments=(*PREFILL, PREFILL[-1], *slabs)),
        *(decode(size, TensorType((size, None), I64), *slabs) for size in (2, 4)),
    ]
    check_program(Listed(*staged), config)
    with pytest.raises(ArtifactError, match=r"takes 5 .*2 cache slab.*means 7"):
        check_program(Listed(*WHOLE), config)


def test_where_all_layers_have_a_window_there_is_one_table() -> None:
    cache = dataclasses.replace(CONFIG.paged_kv_cache, window_tokens=5, pools={"window": 2})
    config = dataclasses.replace(CONFIG, paged_kv_cache=cache)
    assert not config.has_window_table
    check_program(Listed(*WHOLE), config)


def adjusted_sample(rows: int, edits: TensorType) -> EntrySignature:
    of_rows = TensorType((rows,), I64)
    arguments = (
        *(TensorType((None, 1, 64), F32), of_rows, of_rows, of_rows, TensorType((6, rows), I64)),
        *(TensorType((3, rows), F32), edits, TensorType((None, 2), I32), of_rows, of_rows),
        *(TensorType((None,), I64), TensorType((None, 64), I32)),
    )
    return EntrySignature(f"adjusted_sample_bs{rows}", arguments, (of_rows,))


def test_an_entry_that_adjusts_rows_is_checked_like_others() -> None:
    check_program(Listed(*WHOLE, adjusted_sample(4, TensorType((4, None), I32))), CONFIG)
    for wrong in (TensorType((4, None), I64), TensorType((3, None), I32)):
        with pytest.raises(ArtifactError, match=r"`adjusted_sample_bs4` takes .* as edits"):
            check_program(Listed(*WHOLE, adjusted_sample(4, wrong)), CONFIG)
