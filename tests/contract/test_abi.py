from __future__ import annotations

import pytest

from shortfin_apps.llm.contract.abi import Entry, EntryClass, EntryFamily, Layout, named_results

NAMES = {
    "prefill_bs4": Entry(EntryFamily.PREFILL, 4, None),
    "prefill_bs1_s128": Entry(EntryFamily.PREFILL, 1, 128),
    "decode_bs16": Entry(EntryFamily.DECODE, 16, 1),
    "decode_loop_bs4": Entry(EntryFamily.DECODE_LOOP, 4, 1),
    "sample_bs4": Entry(EntryFamily.SAMPLE, 4, None),
    "adjusted_sample_bs4": Entry(EntryFamily.ADJUSTED_SAMPLE, 4, None),
    "logprobs_bs4": Entry(EntryFamily.LOGPROBS, 4, None),
    "extend": Entry(EntryFamily.EXTEND, None, None),
    "extend_t64": Entry(EntryFamily.EXTEND, None, 64),
}


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_is_its_name(name: str) -> None:
    assert Entry.parse(name) == NAMES[name]
    assert NAMES[name].name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "prefill",
        "decode_bs",
        "decode_bs4_s8",
        "prefill_bs1_t8",
        "extend_bs2",
        "extend_s8",
        "decode_loop",
        "other",
    ],
)
def test_other_functions_are_no_entries(name: str) -> None:
    assert Entry.parse(name) is None


def test_prefill_and_decode_differ_in_the_order_of_positions() -> None:
    assert NAMES["prefill_bs1_s128"].argument_shapes() == {
        "tokens": (1, 128),
        "start_positions": (1,),
        "seq_lens": (1,),
        "seq_block_ids": (1, None),
    }
    upstream = NAMES["prefill_bs4"].argument_shapes(has_prefill_position=False)
    assert list(upstream) == ["tokens", "seq_lens", "seq_block_ids"]
    decode = NAMES["decode_bs16"].argument_shapes(has_prefill_position=False)
    assert list(decode) == ["tokens", "seq_lens", "start_positions", "seq_block_ids"]
    assert decode["tokens"] == (16, 1)


def test_an_extend_is_packed_unless_its_tokens_have_rank_two() -> None:
    packed = NAMES["extend_t64"].argument_shapes(tokens_rank=1)
    names = ["tokens", "offsets", "start_positions", "seq_lens", "seq_block_ids", "last_tokens"]
    assert list(packed) == names
    assert (packed["tokens"], packed["offsets"], packed["last_tokens"]) == ((64,), (None,), (None,))
    padded = NAMES["extend"]
    assert padded.layout(tokens_rank=2) is Layout.PREFILL
    assert padded.argument_shapes(tokens_rank=2)["tokens"] == (None, None)
    assert "last_tokens" not in padded.argument_shapes(tokens_rank=2)


def test_a_sample_draws_from_rows_left_on_the_device() -> None:
    sample = NAMES["sample_bs4"]
    assert sample.argument_shapes() == {
        "values": (None, 1, None),
        "indices": (None, 1, None),
        "logits": (None, 1, None),
        "row_indices": (4,),
        "slots": (4,),
        "positions": (4,),
        "sampling": (6, 4),
        "last_tokens": (None,),
    }
    assert not sample.takes_slabs
    assert sample.named_results(["a"], top_k=4) == {"token_ids": "a"}


def test_an_adjusted_sample_takes_edits_of_all_rows_together() -> None:
    sample = NAMES["adjusted_sample_bs4"]
    assert sample.argument_shapes() == {
        "logits": (None, 1, None),
        "row_indices": (4,),
        "slots": (4,),
        "positions": (4,),
        "sampling": (6, 4),
        "penalties": (3, 4),
        "edits": (4, None),
        "allowed": (None, None),
        "allowed_indices": (4,),
        "resets": (4,),
        "last_tokens": (None,),
        "counts": (None, None),
    }
    assert not sample.takes_slabs
    assert sample.named_results(["a"], top_k=4) == {"token_ids": "a"}


def test_logprobs_are_of_rows_left_on_the_device_and_their_tokens() -> None:
    logprobs = NAMES["logprobs_bs4"]
    assert logprobs.argument_shapes() == {
        "values": (None, 1, None),
        "indices": (None, 1, None),
        "logits": (None, 1, None),
        "row_indices": (4,),
        "slots": (4,),
        "last_tokens": (None,),
    }
    assert not logprobs.takes_slabs
    assert not logprobs.returns_token_ids
    names = {"terms": "a", "top_values": "b", "top_indices": "c"}
    assert logprobs.named_results(["a", "b", "c"], top_k=4) == names


def test_a_decode_loop_keeps_its_state_on_the_device() -> None:
    loop = NAMES["decode_loop_bs4"]
    assert loop.argument_shapes(has_prefill_position=False) == {
        "tokens": (4,),
        "slots": (4,),
        "positions": (4,),
        "seq_block_ids": (4, None),
        "sampling": (6, 4),
        "last_tokens": (None,),
    }
    assert loop.takes_slabs


def test_a_decode_loop_returns_token_ids_and_what_a_decode_returns() -> None:
    loop, decode = NAMES["decode_loop_bs4"], NAMES["decode_bs16"]
    assert loop.returns_token_ids
    rest = ["b", "c", "d"]
    assert loop.named_results(["a", *rest], top_k=4) == {
        "token_ids": "a",
        **decode.named_results(rest, top_k=4),
    }


def test_results_by_name() -> None:
    assert named_results(["a"], top_k=None) == {"logits": "a"}
    assert named_results(["a", "b"], top_k=4) == {"values": "a", "indices": "b"}
    assert named_results(["a", "b", "c"], top_k=4) == {"values": "a", "indices": "b", "logits": "c"}


@pytest.mark.parametrize("name", [name for name, entry in NAMES.items() if entry.takes_slabs])
def test_the_table_of_windows_comes_behind_the_other(name: str) -> None:
    shapes = NAMES[name].argument_shapes(has_windows=True)
    names = list(shapes)
    assert names[names.index("seq_block_ids") + 1] == "window_block_ids"
    assert shapes.pop("window_block_ids") == shapes["seq_block_ids"]
    assert shapes == NAMES[name].argument_shapes()


@pytest.mark.parametrize("name", NAMES)
def test_only_a_packed_extend_takes_followers(name: str) -> None:
    shapes = NAMES[name].argument_shapes(takes_followers=True)
    if NAMES[name].layout() is Layout.PACKED:
        assert list(shapes)[-2:] == ["followers", "last_tokens"]
        assert shapes.pop("followers") == shapes["offsets"]
    assert shapes == NAMES[name].argument_shapes()
    padded = NAMES["extend"].argument_shapes(tokens_rank=2, takes_followers=True)
    assert "followers" not in padded


def test_an_entry_that_takes_no_slabs_takes_no_table_of_windows() -> None:
    for sample in (NAMES[f"{name}_bs4"] for name in ("sample", "adjusted_sample", "logprobs")):
        assert sample.argument_shapes(has_windows=True) == sample.argument_shapes()


@pytest.mark.parametrize(
    ("name", "entry_class", "tokens"),
    [
        ("prefill_bs4", EntryClass.DYNAMIC, None),
        ("prefill_bs4_s32", EntryClass.STATIC, 128),
        ("decode_bs8", EntryClass.STATIC, 8),
        ("decode_loop_bs8", EntryClass.STATIC, 8),
        ("extend", EntryClass.DYNAMIC, None),
        ("extend_t64", EntryClass.STATIC, 64),
        ("sample_bs8", EntryClass.ROWS, None),
        ("adjusted_sample_bs8", EntryClass.ROWS, None),
        ("logprobs_bs8", EntryClass.ROWS, None),
    ],
)
def test_an_entry_is_static_if_its_number_of_tokens_is_fixed(
    name: str, entry_class: EntryClass, tokens: int | None
) -> None:
    entry = Entry.parse(name)
    assert entry is not None
    assert (entry.entry_class(), entry.bucket_tokens) == (entry_class, tokens)
