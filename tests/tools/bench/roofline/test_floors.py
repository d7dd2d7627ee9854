from __future__ import annotations

from dataclasses import replace

import pytest

from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.config import ModelConfig, PagedKVCacheConfig
from shortfin_apps.llm.model.experts import RoutedExperts
from shortfin_apps.llm.model.spec import ModelSpec
from shortfin_apps.llm.tools.bench.roofline.cases import Plan, make_batch
from shortfin_apps.llm.tools.bench.roofline.floors import CostModel, Work

# One layer of 2 query heads and 1 K/V head of 4: hidden 8, qkv 16, ffn 16, 10 words.
SPEC = ModelSpec(
    name="hand-made",
    architecture="llama",
    vocab_size=10,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
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
    spec = replace(
        SPEC,
        num_hidden_layers=2,
        experts=RoutedExperts(count=5, per_token=2, features=3, dense_layers=(0,)),
    )
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
