from __future__ import annotations

from dataclasses import replace

import pytest

from shortfin_apps.llm.components.invocation.buckets import Buckets
from shortfin_apps.llm.components.kvcache.lease import SCRATCH_PAGE
from shortfin_apps.llm.components.runtime.device import EntrySignature
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.config import ModelConfig, PagedKVCacheConfig
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.feed_forward import MLP, MoE
from shortfin_apps.llm.model.rope import Rope
from shortfin_apps.llm.model.spec import ModelSpec
from shortfin_apps.llm.tools.bench.roofline.cases import (
    Choice,
    CostModel,
    Plan,
    Work,
    choose,
    make_batch,
    plans,
)
from tests.builder.specs import changed, with_blocks
from tests.components.fake_device import fake_config

STRIDE = 4


def buckets(*names: str) -> Buckets:
    return Buckets(
        {name: EntrySignature(name, None, None) for name in names}, STRIDE, has_prefill_position=True
    )


ENTRIES = buckets("decode_bs1", "decode_bs4", "prefill_bs1", "prefill_bs1_s8", "extend")


@pytest.mark.parametrize(("rows", "new_tokens", "context"), [(1, 1, 1), (4, 1, 9), (2, 7, 7), (3, 4, 12)])
def test_rows_do_not_share_pages(rows: int, new_tokens: int, context: int) -> None:
    plan = Plan(EntryFamily.EXTEND, rows, new_tokens, context)
    batch = make_batch(plan, STRIDE)
    pages = [page for task in batch.tasks for page in task.page_ids]
    assert sorted(pages) == list(range(1, 1 + plan.pages(STRIDE)))
    assert SCRATCH_PAGE not in pages
    for task in batch.tasks:
        assert (len(task.token_ids), task.seq_len) == (new_tokens, context)
        assert task.start_position == context - new_tokens
        assert len(task.page_ids) == -(-context // STRIDE)


def test_pages_are_not_in_order() -> None:
    (task,) = make_batch(Plan(EntryFamily.DECODE, 1, 1, 64), STRIDE).tasks
    assert list(task.page_ids) != sorted(task.page_ids)


def test_plans_skip_lengths_beyond_the_context() -> None:
    config = fake_config()
    longest = config.max_seq_len
    found = list(plans(config, Choice([], [longest, longest + 1], [longest + 1, STRIDE]), has_extend=True))
    assert {plan.context for plan in found} == {longest, STRIDE}
    of_rows = {EntryFamily.SAMPLE, EntryFamily.ADJUSTED_SAMPLE, EntryFamily.LOGPROBS}
    not_planned = {EntryFamily.DECODE_LOOP, EntryFamily.DRAFT, *of_rows}
    assert {plan.family for plan in found} == set(EntryFamily) - not_planned
    without = plans(config, Choice([], [longest], [STRIDE]), has_extend=False)
    assert EntryFamily.EXTEND not in {plan.family for plan in without}


def test_the_entry_is_the_one_a_server_would_take() -> None:
    chosen = [
        Plan(EntryFamily.DECODE, 3, 1, 5),
        Plan(EntryFamily.PREFILL, 1, 8, 8),
        Plan(EntryFamily.PREFILL, 1, 12, 12),
    ]
    cases = choose(chosen, ENTRIES, STRIDE, [])
    assert [case.entry for case in cases] == ["decode_bs4", "prefill_bs1_s8", "prefill_bs1"]


def test_patterns_select_entries() -> None:
    chosen = [
        Plan(EntryFamily.DECODE, 1, 1, 5),
        Plan(EntryFamily.PREFILL, 1, 8, 8),
        Plan(EntryFamily.EXTEND, 1, 8, 8),
    ]
    cases = choose(chosen, ENTRIES, STRIDE, ["decode_*", "extend"])
    assert [case.entry for case in cases] == ["decode_bs1", "extend"]
    with pytest.raises(InvalidRequestError, match=r"no entry matches verify; there are decode_bs1, extend"):
        choose(chosen, ENTRIES, STRIDE, ["verify"])


# One layer of 2 query heads and 1 K/V head of 4: hidden 8, qkv 16, ffn 16, 10 words.
SPEC = ModelSpec(
    name="hand-made",
    architecture="llama",
    vocab_size=10,
    hidden_size=8,
    layers=((Attention(heads=2, kv_heads=1, head_dim=4, rope=Rope()), MLP(features=16)),),
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)
CONFIG = ModelConfig(
    max_seq_len=64,
    transformer_block_count=1,
    attn_head_dim=4,
    prefill_batch_sizes=(1,),
    decode_batch_sizes=(1, 2),
    paged_kv_cache=PagedKVCacheConfig(
        attention_head_count_kv=1, block_seq_stride=4, device_block_count=64, kv_cache_dtype="float16"
    ),
    has_prefill_position=True,
)
MATRICES = 16 * 8 + 8 * 8 + 32 * 8 + 8 * 16  # qkv, output, gate and up, down
HEAD = 10 * 8
PARAMETERS = {"token_embd.weight": 2 * HEAD, "blk.0.everything": 2 * MATRICES, "norms": 4 * 3 * 8}
TOKEN_BYTES = 2 * 4 * 2  # K and V of one token
KV_PAIR_FLOPS = 2 * 2 * 4 * 2  # multiply and add, QK and PV, head_dim, heads


def work(plan: Plan, spec: ModelSpec = SPEC) -> Work:
    return CostModel(spec, CONFIG, PARAMETERS).of(make_batch(plan, CONFIG.stride))


def test_a_decode_reads_the_weights_and_its_pages_once() -> None:
    """Token 9 of each row has 8 before it: two pages."""
    expected = sum(PARAMETERS.values()) + 2 * (2 * 8 + 2 * 4 * TOKEN_BYTES + TOKEN_BYTES)
    assert work(Plan(EntryFamily.DECODE, 2, 1, 9)) == Work(
        expected, 2 * (2 * MATRICES + 2 * HEAD + 9 * KV_PAIR_FLOPS)
    )


def test_of_experts_those_of_one_token_count() -> None:
    """A second layer has 2 of 5 experts of 3 features, and a router."""
    spec = with_blocks(changed(SPEC, layers=2), {1: MoE(count=5, per_token=2, features=3)})
    router, expert, attention = 5 * 8, 3 * 3 * 8, 16 * 8 + 8 * 8
    parameters = {
        **PARAMETERS,
        "blk.1.rest": 2 * (attention + router),
        "blk.1.ffn_exps.weight": 2 * 5 * expert,
    }
    dense = work(Plan(EntryFamily.DECODE, 1, 1, 1))
    routed = CostModel(spec, CONFIG, parameters).of(
        make_batch(Plan(EntryFamily.DECODE, 1, 1, 1), CONFIG.stride)
    )
    added = attention + router + 2 * expert
    assert routed.num_bytes == dense.num_bytes + 2 * added
    assert routed.flops == dense.flops + 2 * added + KV_PAIR_FLOPS


def test_a_partial_page_counts_as_a_page() -> None:
    bytes_of = [work(Plan(EntryFamily.DECODE, 1, 1, context)).num_bytes for context in (5, 6, 9, 10)]
    page = 4 * TOKEN_BYTES
    assert [b - bytes_of[0] for b in bytes_of] == [0, page, page, 2 * page]


def test_a_prefill_counts_the_head_once_and_causal_attention() -> None:
    prefill = work(Plan(EntryFamily.PREFILL, 1, 6, 6))
    assert prefill.flops == 2 * 6 * MATRICES + 2 * HEAD + (1 + 2 + 3 + 4 + 5 + 6) * KV_PAIR_FLOPS
    assert prefill.num_bytes == sum(PARAMETERS.values()) + 6 * (2 * 8 + TOKEN_BYTES)


def test_chunks_sum_to_the_attention_of_the_prompt() -> None:
    whole = work(Plan(EntryFamily.EXTEND, 1, 12, 12))
    first, second = work(Plan(EntryFamily.EXTEND, 1, 8, 8)), work(Plan(EntryFamily.EXTEND, 1, 4, 12))
    assert first.flops + second.flops == whole.flops + 2 * HEAD


def test_an_untied_embedding_is_read_by_row() -> None:
    plan = Plan(EntryFamily.DECODE, 1, 1, 5)
    untied = work(plan, replace(SPEC, tie_word_embeddings=False))
    assert work(plan).num_bytes - untied.num_bytes == 2 * HEAD


def test_an_embedding_in_blocks_is_read_by_row_with_its_scales() -> None:
    parameters = {"token_embd.weight": HEAD, "token_embd.weight.scales": 20, "output.weight": 2 * HEAD}
    model = CostModel(replace(SPEC, tie_word_embeddings=False), CONFIG, parameters)
    batch = make_batch(Plan(EntryFamily.DECODE, 1, 1, 1), CONFIG.stride)
    assert model.of(batch).num_bytes == 2 * HEAD + 8 + 2 + TOKEN_BYTES


def test_the_floor_is_the_maximum_of_memory_and_compute_time() -> None:
    some = Work(num_bytes=100, flops=1000)
    assert some.floor_s(bytes_per_s=10, flops_per_s=1000) == pytest.approx(10)
    assert some.floor_s(bytes_per_s=1000, flops_per_s=10) == pytest.approx(100)
    assert some.is_memory_bound(10, 1000)
    assert not some.is_memory_bound(1000, 10)
