from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.builder.program.entry import entries_of
from shortfin_apps.llm.builder.sources.random_tiny import SPEC
from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.runtime.device import Array
from shortfin_apps.llm.components.self_test import entries
from shortfin_apps.llm.components.self_test.computed import Computed
from shortfin_apps.llm.components.self_test.last_tokens import packed_arguments
from shortfin_apps.llm.components.self_test.self_test import Outcome
from shortfin_apps.llm.model.delta_net import DeltaNet
from shortfin_apps.llm.model.draft_layer import PROJECTION, DraftLayer
from shortfin_apps.llm.model.eagle_head import EagleHead
from shortfin_apps.llm.model.feed_forward import MLP, MoE
from shortfin_apps.llm.model.kv_layout import KVType
from shortfin_apps.llm.model.rope import Rope, YarnScaling
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, WeightType
from tests.builder.specs import changed, with_blocks
from tests.components.self_test.compiled import OPTIONS, Built, Opened, build_model, opened
from tests.matrices import slow_rows_but

BIASED = changed(
    SPEC, {"bias": True, "output_bias": True, "qk_norm": True, "score_scale": 0.5, "embedding_scale": 2.0}
)
SCALED = changed(
    SPEC,
    {
        "rope": Rope(
            dim=12,
            scaling=YarnScaling(factor=4.0, original_max_position_embeddings=64, attention_factor=1.1),
        ),
    },
    at={1: {"rope": None}},
)
WINDOWED = changed(
    SPEC, {"norm_after": True, "activation": "gelu", "cap": 4.0, "logit_cap": 9.0}, at={0: {"window": 20}}
)
ALL_WINDOWED = changed(SPEC, at={n: {"window": 20} for n in range(len(SPEC.layers))})
SINKS = changed(SPEC, {"sinks": True, "whole_qk_norm": True})
ROUTED = with_blocks(SPEC, {1: MoE(count=7, per_token=3, features=96)})
HYBRID = with_blocks(
    changed(SPEC, {"architecture": "qwen35", "gate": True}),
    {0: DeltaNet(key_heads=2, value_heads=6, key_dim=12, value_dim=16)},
)
DRAFTING = replace(HYBRID, draft=DraftLayer(blocks=HYBRID.layers[1]))
SPECS: dict[str, ModelSpec] = {
    "llama": SPEC,
    "biased": BIASED,
    "scaled": SCALED,
    "windowed": WINDOWED,
    "all windowed": ALL_WINDOWED,
    "sinks": SINKS,
    "routed": ROUTED,
    "hybrid": HYBRID,
    "drafting": DRAFTING,
    "drafting head": replace(
        SPEC,
        draft=EagleHead(
            blocks=(replace(SPEC.attention, norm_before=False), MLP(features=96)),
            reads=(1, 2, 1),
            vocab_size=SPEC.vocab_size,
        ),
    ),
    "drafting llama": replace(SPEC, draft=DraftLayer(blocks=SPEC.layers[0], keeps_normed=False)),
}
TYPES: tuple[tuple[WeightType, KVType], ...] = (
    *(("bf16", "bf16"), ("f32", "f32"), ("f16", "f16"), ("bf16", "q8_0"), ("f32", "q8_0")),
    *(("q8_0", "bf16"), ("q4", "bf16"), ("int8", "bf16")),
)
# Each spec in one of the two types, and each type with the plainest spec.
CASES = [
    *((name, *types) for name, types in zip(SPECS, cycle(TYPES[:2]), strict=False)),
    *(("llama", *types) for types in TYPES[1:]),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_model(tmp_path_factory.mktemp("tiny"))


def assert_nothing_is_held(model: Opened) -> None:
    model.cache.check_integrity()
    usage = model.cache.usage()
    assert usage.free == usage.total
    assert not model.cache.has_suspects
    if (window := model.cache.window_usage()) is not None:
        assert window.free == window.total


@pytest.mark.parametrize(("name", "weights", "kv"), slow_rows_but([CASES[0]], CASES), ids=str)
def test_a_right_model_passes_with_the_same_bits_of_every_entry(
    name: str, weights: WeightType, kv: KVType, tmp_path: Path
) -> None:
    options = replace(OPTIONS, weights=weights, kv=kv)
    with opened(build_model(tmp_path, SPECS[name], options)) as model:
        outcome = model.self_test.run()
        again = model.self_test.run()
        assert_nothing_is_held(model)
    assert outcome.failures(same_bits=True) == []
    assert outcome.untested == []
    has_draft = SPECS[name].draft is not None
    listed = entries_of(options, draws_rows=True, has_draft=has_draft)
    assert sorted(outcome.entries) == sorted(entry.name for entry in listed)
    assert again.failures(same_bits=True, known_bits=outcome.bits) == []
    assert again.bits == outcome.bits


@pytest.mark.parametrize("name", [f"blk.2.{each}" for each in (PROJECTION, "attn_output.weight")])
def test_a_faulty_draft_layer_is_found(tmp_path: Path, name: str) -> None:
    """Its entries alone fail: the other entries only store its keys and values."""
    built = build_model(tmp_path, DRAFTING, replace(OPTIONS, weights="f32", kv="f32"))
    for index in range(1000):
        built.flip(name, 4, index, 30)  # the exponent's highest bit
    with opened(built) as model:
        failed = {each.entry for each in model.self_test.run().failures()}
    assert failed == {"draft_bs1", "draft_bs4"}


def test_a_row_that_does_not_continue_the_one_before_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An `extend` that takes each row's state from the pages, as if it took no followers."""

    def without(tasks: Sequence[LlmTaskInput], length: int, num_followers: int) -> dict[str, Array]:
        assert num_followers > 0
        return packed_arguments(tasks, length)

    monkeypatch.setattr(entries, "packed_arguments", without)
    with opened(build_model(tmp_path, HYBRID)) as model:
        failures = model.self_test.run().failures()
    assert {failure.entry for failure in failures} == {"extend", "extend_t64"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        # a context of two pages and a bit; chunks of a page; an extend with room for two rows
        BuildOptions(
            prefill_batch_sizes=(3,),
            decode_batch_sizes=(2, 5),
            chunk_sizes=(16,),
            extend_sizes=(2,),
            context_length=34,
            top_k=4,
        ),
        # a page that is the whole context
        BuildOptions(
            prefill_batch_sizes=(1,),
            decode_batch_sizes=(3,),
            block_seq_stride=32,
            context_length=32,
            top_k=4,
        ),
        # pages of few tokens, chunks longer than a prompt
        BuildOptions(
            prefill_batch_sizes=(2,),
            decode_batch_sizes=(1,),
            chunk_sizes=(4, 24),
            block_seq_stride=4,
            context_length=64,
            top_k=4,
        ),
    ],
    ids=["short", "one-page", "small-pages"],
)
def test_other_shapes_pass(tmp_path: Path, options: BuildOptions) -> None:
    with opened(build_model(tmp_path, SPEC, options)) as model:
        outcome = model.self_test.run()
        assert_nothing_is_held(model)
    assert outcome.failures(same_bits=True) == []
    assert outcome.untested == []
    assert sorted(outcome.entries) == sorted(entry.name for entry in entries_of(options, draws_rows=True))


@pytest.mark.parametrize("num_pages", [2, 3, 5, 7, 8, 12])
def test_with_few_pages_fewer_rows_are_tested(tiny: Built, num_pages: int) -> None:
    with opened(tiny, num_pages) as model:
        outcome = model.self_test.run()
        assert_nothing_is_held(model)
    assert outcome.failures(same_bits=True) == []
    assert len(outcome.entries) == len(entries_of(OPTIONS, draws_rows=True))
    if num_pages == 2:
        assert set(outcome.untested) == set(outcome.entries)
    if num_pages == 12:
        assert outcome.untested == []


@given(stops=st.lists(st.integers(1, 6), max_size=12))
@settings(max_examples=10)
def test_a_run_that_is_stopped_holds_no_page_and_goes_on(tiny: Built, stops: list[int]) -> None:
    with opened(tiny) as model:
        whole = model.self_test.run()
        outcome = Outcome(tiny.file)
        for stop in stops:
            steps = model.self_test.steps(outcome)
            for _ in range(stop):
                if next(steps, steps) is steps:
                    break
            steps.close()
            assert_nothing_is_held(model)
        for _ in model.self_test.steps(outcome):
            pass
        assert_nothing_is_held(model)
    assert outcome.bits == whole.bits


def test_a_row_of_other_bits_is_blamed_on_the_entry_that_is_alone(tiny: Built) -> None:
    rows = [
        Computed(entry=entry, row=0, prompt=0, position=3, bits=bits)
        for entry, bits in (("prefill_bs1", b"a"), ("decode_bs1", b"b"), ("decode_bs4", b"a"))
    ]
    outcome = Outcome(tiny.file, rows)
    assert outcome.failures() == []
    assert [each.entry for each in outcome.failures(same_bits=True)] == ["decode_bs1"]


def test_other_bits_than_before_are_a_failure(tiny: Built) -> None:
    row = Computed(entry="decode_bs1", row=0, prompt=0, position=3, bits=b"a")
    outcome = Outcome(tiny.file, [row])
    assert outcome.failures(known_bits={row.key: b"a"}) == []
    [failure] = outcome.failures(known_bits={row.key: b"b"})
    assert "other bits than it did" in failure.problem
