"""The compiled model against the numpy forward pass, and against itself.

Every test starts from a page table full of NaN, and from pages in random order.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.builder.program.module import ModelModule
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.model.rope import Llama3Scaling, Rope
from shortfin_apps.llm.model.spec import BuildOptions, WeightType
from shortfin_apps.llm.model.weight_blocks import Q8_0, BlockType
from tests.builder.agreement import STRIDE, Tokens, expect, expect_extend, pages_for, prefill_row
from tests.builder.compiled_model import GENERIC, NAN_BYTE, OTHERS, TINY, CompiledModel, block_table
from tests.builder.specs import changed
from tests.compiled_programs import compile_program
from tests.matrices import slow_but

LLAMA3 = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
PREFILLS = [("prefill_bs1", 1), ("prefill_bs1_s32", 1), ("prefill_bs3", 3), ("prefill_bs3_s32", 3)]
# Weights of one layer that another layer has in fewer bits.
FINER = tuple((f"blk.{name}.weight", Q8_0) for name in ("0.attn_qkv", "1.ffn_gate_up", "1.ffn_down"))
OF_GROUPS = (
    ("blk.0.attn_qkv.weight", BlockType(8, 16, has_minima=True, group=32)),
    ("blk.1.ffn_down.weight", BlockType(8, group=32)),
)
DECODES = [("decode_bs1", 1), ("decode_bs2", 2), ("decode_bs4", 4)]
DRAWS = ["decode_loop_bs4", "sample_bs4", "adjusted_sample_bs4", "logprobs_bs4"]


@pytest.fixture(params=slow_but(["bf16"], ["f32", "bf16", "int8", "kv-q8_0", *OTHERS, "routed"]))
def model(request: pytest.FixtureRequest, models: dict[str, CompiledModel]) -> CompiledModel:
    chosen: CompiledModel = models[request.param]
    chosen.fill_cache(NAN_BYTE)
    return chosen


def random_tokens(rng: np.random.Generator, *lengths: int) -> list[Tokens]:
    return [rng.integers(0, TINY.vocab_size, length) for length in lengths]


@pytest.mark.parametrize(("entry", "rows"), PREFILLS)
def test_prefill_agrees_with_the_reference(model: CompiledModel, entry: str, rows: int) -> None:
    rng = np.random.default_rng(1)
    lengths = [30, 17, 1][: max(1, rows - 1)]
    prompts = random_tokens(rng, *lengths)
    blocks = block_table(rng, [pages_for(n) for n in lengths] + [0] * (rows - len(lengths)), 3)
    tokens = np.zeros((rows, 32), np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    seq_lens = np.array(lengths + [1] * (rows - len(lengths)))
    result = model.prefill(entry, tokens, np.zeros(rows), seq_lens, blocks)
    for row, prompt in enumerate(prompts):
        expect(model, result.logits[row], prompt)


@pytest.mark.parametrize(("entry", "rows"), DECODES)
def test_decode_agrees_with_the_reference(model: CompiledModel, entry: str, rows: int) -> None:
    rng = np.random.default_rng(2)
    lengths = [70, 15, 33][: max(1, rows - 1)]
    prompts = random_tokens(rng, *lengths)
    padding = rows - len(lengths)
    blocks = block_table(rng, [pages_for(n + 3) for n in lengths] + [0] * padding, 6)
    for row, prompt in enumerate(prompts):
        prefill_row(model, prompt, blocks[row : row + 1], chunk=128)
    for _ in range(3):
        new = random_tokens(rng, *[1] * len(prompts))
        starts = np.array([len(p) for p in prompts] + [0] * padding)
        prompts = [np.concatenate(pair) for pair in zip(prompts, new, strict=True)]
        tokens = np.array([*(n[0] for n in new), *[0] * padding])[:, None]
        result = model.decode(entry, tokens, starts, blocks)
        for row, prompt in enumerate(prompts):
            expect(model, result.logits[row], prompt)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(1, 150),
    chunk_pages=st.integers(1, 8),
    spare=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_any_chunking_agrees_with_the_reference(
    model: CompiledModel, length: int, chunk_pages: int, spare: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    (prompt,) = random_tokens(rng, length)
    pages = pages_for(length)
    # Wide enough for the last chunk's padding, as the ABI asks, and for `spare` pages more.
    blocks = block_table(rng, [pages], pages + spare)
    model.fill_cache(NAN_BYTE)
    result = prefill_row(model, prompt, blocks, chunk_pages * STRIDE)
    expect(model, result.logits[0], prompt)


def test_a_row_is_bit_identical_whatever_is_beside_it_and_however_it_is_cut(model: CompiledModel) -> None:
    rng = np.random.default_rng(3)
    first, second, third = random_tokens(rng, 60, 64, 5)
    alone = block_table(rng, [4], 4)
    whole = prefill_row(model, first, alone, chunk=64).logits[0]
    np.testing.assert_array_equal(prefill_row(model, first, alone, chunk=32).logits[0], whole)
    np.testing.assert_array_equal(prefill_row(model, first, alone, 32, "prefill_bs1_s32").logits[0], whole)
    blocks = block_table(rng, [4, 4, 1], 4)
    tokens = np.stack([np.pad(t, (0, 64 - len(t))) for t in (second, first, third)])
    beside = model.prefill("prefill_bs3", tokens, np.zeros(3), np.array([64, 60, 5]), blocks)
    np.testing.assert_array_equal(beside.logits[1], whole)
    step = model.decode("decode_bs1", np.array([[7]]), np.array([60]), blocks[1:2])
    four = model.decode(
        "decode_bs4",
        np.array([[1], [2], [7], [0]]),
        np.array([63, 5, 60, 0]),
        blocks[[0, 2, 1, 0]] * [[1], [1], [1], [0]],
    )
    np.testing.assert_array_equal(four.logits[2], step.logits[0])


def test_only_owned_pages_and_the_scratch_page_are_written(model: CompiledModel) -> None:
    rng = np.random.default_rng(4)
    (prompt,) = random_tokens(rng, 20)
    blocks = np.zeros((3, 4), np.int64)
    blocks[0, :2] = [7, 3]
    tokens = np.zeros((3, 64), np.int64)
    tokens[0, :20] = prompt
    before = model.read_cache().copy()
    model.prefill("prefill_bs3", tokens, np.zeros(3), np.array([20, 1, 1]), blocks)
    written = np.flatnonzero((model.read_cache() != before).any(axis=1))
    assert set(written) <= {0, 3, 7}
    assert {3, 7} <= set(written)
    before = model.read_cache().copy()
    model.decode("decode_bs2", np.array([[5], [0]]), np.array([20, 0]), blocks[:2])
    written = np.flatnonzero((model.read_cache() != before).any(axis=1))
    assert set(written) <= {0, 3}


def test_a_chunk_wider_than_the_block_table_spills_into_the_scratch_page_only(model: CompiledModel) -> None:
    rng = np.random.default_rng(5)
    (prompt,) = random_tokens(rng, 10)
    tokens = np.zeros((1, 64), np.int64)
    tokens[0, :10] = prompt
    before = model.read_cache().copy()
    result = model.prefill("prefill_bs1", tokens, np.array([0]), np.array([10]), np.array([[9]]))
    expect(model, result.logits[0], prompt)
    assert set(np.flatnonzero((model.read_cache() != before).any(axis=1))) <= {0, 9}


def test_shared_full_pages_are_read_and_not_written(model: CompiledModel) -> None:
    rng = np.random.default_rng(6)
    prefix, own = random_tokens(rng, 32, 9)
    prefill_row(model, prefix, np.array([[11, 5]]), chunk=32)
    before = model.read_cache().copy()
    tokens = np.zeros((1, 16), np.int64)
    tokens[0, :9] = own
    result = model.prefill("prefill_bs1", tokens, np.array([32]), np.array([41]), np.array([[11, 5, 2]]))
    expect(model, result.logits[0], np.concatenate([prefix, own]))
    np.testing.assert_array_equal(model.read_cache()[[11, 5]], before[[11, 5]])


def test_values_and_indices_are_the_largest_logits(model: CompiledModel) -> None:
    rng = np.random.default_rng(7)
    (prompt,) = random_tokens(rng, 40)
    result = prefill_row(model, prompt, block_table(rng, [3], 3), chunk=48)
    order = np.argsort(-result.logits, axis=1, kind="stable")[:, :8]
    np.testing.assert_array_equal(result.indices, order)
    np.testing.assert_array_equal(result.values, np.take_along_axis(result.logits, order, axis=1))


@pytest.mark.slow
def test_entries_declare_their_types(models: dict[str, CompiledModel]) -> None:
    entries = models["bf16"].program.entries
    assert sorted(entries) == sorted(
        [*(name for name, _ in PREFILLS + DECODES), "extend", "extend_t64", *DRAWS]
    )
    arguments, results = entries["decode_bs4"].arguments, entries["decode_bs4"].results
    assert arguments is not None
    assert results is not None
    assert [a.shape for a in arguments] == [(4, 1), (4,), (4,), (4, None), (None, 2 * 2 * 2 * 16 * 16)]
    assert [r.shape for r in results] == [(4, 1, 8), (4, 1, 8), (4, 1, 512)]
    assert str(arguments[4].dtype) == "bfloat16"
    chunk = entries["prefill_bs3_s32"].arguments
    assert chunk is not None
    assert chunk[0].shape == (3, 32)
    extend = entries["extend_t64"]
    assert extend.arguments is not None
    assert extend.results is not None
    cache = (None, 2 * 2 * 2 * 16 * 16)
    assert [a.shape for a in extend.arguments] == [
        *((64,), (None,), (None,), (None,), (None, None), (None,), cache)
    ]
    assert [r.shape for r in extend.results] == [(None, 1, 8), (None, 1, 8), (None, 1, 512)]


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "finer"), [("q8_0", ()), ("q4", ()), ("q4", FINER), ("q4", OF_GROUPS)])
def test_quantised_weights_agree_with_the_reference(
    device: Device, tmp_path: Path, weights: WeightType, finer: tuple[tuple[str, BlockType], ...]
) -> None:
    """The reference has the dequantised weights."""
    options = BuildOptions(
        weights=weights,
        block_types=finer,
        prefill_batch_sizes=(1,),
        decode_batch_sizes=(2,),
        chunk_sizes=(),
        top_k=8,
    )
    spec = changed(TINY, {"tie_word_embeddings": False}, layers=3)
    model = CompiledModel.build(spec, options, device, tmp_path)
    rng = np.random.default_rng(3)
    [prompt] = random_tokens(rng, 70)
    blocks = block_table(rng, [6], 6)
    expect(model, prefill_row(model, prompt, blocks, chunk=32).logits[0], prompt)
    prompt = np.append(prompt, 3)
    tables = np.concatenate([blocks, np.zeros_like(blocks)])
    result = model.decode("decode_bs2", np.array([[3], [0]]), np.array([70, 0]), tables)
    expect(model, result.logits[0], prompt)


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["sapphirerapids", "apple-m1"])
def test_weights_of_several_bits_compile_for_every_kind_of_cpu(cpu: str) -> None:
    """In whole tiles, for AMX."""
    options = BuildOptions(
        weights="q4", block_types=FINER, prefill_batch_sizes=(1,), decode_batch_sizes=(2,), top_k=8
    )
    target = resolve_target(f"cpu:{cpu}")
    spec = changed(TINY, {"head_dim": 32}, layers=4)
    text = ModelModule(spec, options, target).text()
    compile_program(text, target)


@pytest.mark.slow
def test_the_generic_form_agrees_with_the_reference(device: Device, tmp_path: Path) -> None:
    """The form for GPUs, compiled for this CPU, on a model with every other shape of a Llama."""
    spec = changed(
        TINY,
        {"kv_heads": 1, "vocab_size": 320, "tie_word_embeddings": False, "rope": Rope(scaling=LLAMA3)},
        layers=1,
    )
    options = BuildOptions(
        weights="f32", kv="f32", prefill_batch_sizes=(2,), decode_batch_sizes=(2,), chunk_sizes=(), top_k=8
    )
    model = CompiledModel.build(spec, options, device, tmp_path, GENERIC)
    rng = np.random.default_rng(8)
    prompt = rng.integers(0, spec.vocab_size, 70)
    tables = block_table(rng, [6, 5], 6)
    blocks = tables * [[1], [0]]
    for start, end in ((0, 48), (48, 70)):
        tokens = np.zeros((2, 48), np.int64)
        tokens[0, : end - start] = prompt[start:end]
        result = model.prefill("prefill_bs2", tokens, np.array([start, 0]), np.array([end, 1]), blocks)
        expect(model, result.logits[0], prompt[:end])
    prompt = np.append(prompt, 3)
    result = model.decode("decode_bs2", np.array([[3], [0]]), np.array([70, 0]), blocks)
    expect(model, result.logits[0], prompt)
    order = np.argsort(-result.logits[0], kind="stable")[:8]
    np.testing.assert_array_equal(result.indices[0], order)
    expect_extend(model, prompt, 48, tables)


ODD_SHAPES = {
    "three query heads to a key head, short pages, uneven sizes": (
        changed(
            TINY,
            {
                "vocab_size": 330,
                "hidden_size": 80,
                "features": 112,
                "heads": 6,
                "head_dim": 24,
                "tie_word_embeddings": False,
                "rope": Rope(scaling=LLAMA3),
            },
            layers=1,
        ),
        BuildOptions(weights="f16", kv="f32", block_seq_stride=8),
    ),
    "one query head to a key head, long pages": (
        changed(TINY, {"hidden_size": 128, "heads": 2, "head_dim": 128}, layers=1),
        BuildOptions(weights="bf16", kv="f16", block_seq_stride=32),
    ),
    "whole AMX tiles, a window and capped scores": (
        changed(TINY, {"heads": 6, "kv_heads": 2, "head_dim": 32, "cap": 20.0}, at={1: {"window": 40}}),
        BuildOptions(weights="bf16", kv="bf16"),
    ),
    "sixteen query heads to a key head": (
        changed(TINY, {"heads": 16, "kv_heads": 1, "head_dim": 64}, layers=1),
        BuildOptions(weights="f32", kv="bf16", block_seq_stride=16),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_other_shapes_agree_with_the_reference(device: Device, tmp_path: Path, shape: str) -> None:
    spec, options = ODD_SHAPES[shape]
    stride = options.block_seq_stride
    options = replace(
        options,
        prefill_batch_sizes=(1,),
        decode_batch_sizes=(1,),
        chunk_sizes=(),
        top_k=min(options.top_k, 8),
    )
    model = CompiledModel.build(spec, options, device, tmp_path)
    rng = np.random.default_rng(9)
    prompt = rng.integers(0, spec.vocab_size, 101)
    tables = block_table(rng, [-(-102 // stride), -(-102 // stride)], -(-128 // stride))
    blocks = tables[:1]
    tokens = np.zeros((1, 64), np.int64)
    for start, end in ((0, 64), (64, 101)):
        tokens[0] = 0
        tokens[0, : end - start] = prompt[start:end]
        result = model.prefill("prefill_bs1", tokens, np.array([start]), np.array([end]), blocks)
        expect(model, result.logits[0], prompt[:end])
    result = model.decode("decode_bs1", np.array([[3]]), np.array([101]), blocks)
    expect(model, result.logits[0], np.append(prompt, 3))
    expect_extend(model, np.append(prompt, 3), 64, tables)


def test_a_window_no_shorter_than_the_context_makes_the_program_without_one() -> None:
    spec = changed(TINY, at={0: {"window": 64}})
    texts = {
        context: [
            ModelModule(each, BuildOptions(context_length=context), resolve_target("cpu")).text()
            for each in (spec, TINY)
        ]
        for context in (64, 80)
    }
    assert texts[64][0] == texts[64][1]
    assert texts[80][0] != texts[80][1]


@pytest.mark.parametrize("weights", ["bf16", "q4", "int8"])
def test_layers_of_other_sizes_have_fused_kernels_of_their_own(weights: WeightType) -> None:
    spec = changed(TINY, {"head_dim": 32}, layers=3, at={1: {"features": 64}, 2: {"features": 96}})
    target = resolve_target("cpu:znver4")
    options = BuildOptions(weights=weights, prefill_batch_sizes=(1,), decode_batch_sizes=(1,))
    text = ModelModule(spec, options, target).text()
    types = {"bf16": "", "q4": "_q4_b32m" * 4, "int8": ""}[weights]
    for suffix in ("", "_1"):
        assert f"@decode_fused_layer_x_qkv{types}{suffix} {{" in text


def test_a_decode_with_gates_of_attention_attends_apart_from_the_fused_layer() -> None:
    spec = changed(TINY, {"head_dim": 32, "gate": True})
    options = BuildOptions(prefill_batch_sizes=(1,), decode_batch_sizes=(1,))
    text = ModelModule(spec, options, resolve_target("cpu:znver4")).text()
    assert "@fused_layer_x {" in text
    assert "@decode_fused_layer" not in text
