from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.buckets import Buckets
from shortfin_apps.llm.components.invocation.invoker import owned_bytes
from shortfin_apps.llm.components.invocation.padding_runs import decode_s, warm_up
from shortfin_apps.llm.components.invocation.static_threshold import with_static_threshold
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.runtime.device import Program, TensorType
from shortfin_apps.llm.contract.abi import Entry, EntryClass, EntryFamily
from shortfin_apps.llm.contract.errors import ArtifactError
from tests.components.engine_fixture import PROMPT, call, make_rig
from tests.components.fake_device import FakeProgram, fake_config

STRIDE = 4


def program_of(
    static_lengths: tuple[int, ...] = (),
    extend_lengths: tuple[int, ...] = (),
    loop_sizes: tuple[int, ...] = (),
    extend_rank: int = 1,
) -> FakeProgram:
    program = FakeProgram(fake_config(stride=STRIDE), static_lengths=static_lengths)
    program.extend_rank, program.extend_lengths, program.loop_sizes = extend_rank, extend_lengths, loop_sizes
    return program


def buckets_of(program: Program) -> Buckets:
    return Buckets(program.entries, STRIDE, has_prefill_position=True)


def decode() -> LlmTaskInput:
    return LlmTaskInput(Request(call("r", [1])), [1], 4, 5, [1, 2])


def chunk(num_tokens: int) -> LlmTaskInput:
    return LlmTaskInput(Request(call("r", [1])), [1] * num_tokens, 0, num_tokens, list(range(1, 12)))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    family = draw(st.sampled_from([EntryFamily.DECODE, EntryFamily.PREFILL, EntryFamily.EXTEND]))
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    tasks = [decode() if family is EntryFamily.DECODE else chunk(length) for length in lengths]
    return Batch(family, tuple(tasks))


@given(
    batch=batches(),
    threshold=st.integers(0, 40),
    static_lengths=st.sets(st.sampled_from([4, 8, 16])),
    extend_lengths=st.sets(st.integers(1, 40)),
    draws=st.booleans(),
)
def test_a_batch_takes_an_entry_that_holds_it_and_above_the_threshold_a_dynamic_one(
    batch: Batch, threshold: int, static_lengths: set[int], extend_lengths: set[int], draws: bool
) -> None:
    program = program_of(tuple(sorted(static_lengths)), tuple(sorted(extend_lengths)), (1, 4, 8))
    shape = buckets_of(with_static_threshold(program, threshold)).nearest(batch, draws=draws)
    entry = Entry.parse(shape.entry)
    assert entry is not None
    num_tokens = sum(len(task.token_ids) for task in batch.tasks)
    assert shape.rows >= len(batch.tasks)
    assert shape.tokens >= num_tokens
    assert (entry.bucket_tokens or 0) <= threshold
    if num_tokens > threshold:
        assert entry.entry_class() is EntryClass.DYNAMIC
    elif batch.family is EntryFamily.DECODE and threshold >= 8:
        assert entry.entry_class() is EntryClass.STATIC, "a bucket is left that holds it"


def test_all_entries_are_used_without_a_threshold() -> None:
    program = program_of(static_lengths=(8,))
    assert with_static_threshold(program, None) is program


def test_entries_that_compute_no_tokens_are_never_off() -> None:
    program = program_of()
    program.sample_sizes = program.logprob_sizes = (8,)
    kept = with_static_threshold(program, 0).entries
    assert set(kept) == {"prefill_bs1", "prefill_bs4", "extend", "sample_bs8", "logprobs_bs8"}


@pytest.mark.parametrize("extend_rank", [0, 2])
def test_decodes_without_a_packed_extend_are_refused_by_name(extend_rank: int) -> None:
    program = program_of(extend_rank=extend_rank)
    largest = max(program.config.decode_batch_sizes)
    with pytest.raises(ArtifactError, match=rf"turns off .*decode_bs{largest}.*threshold to {largest}$"):
        with_static_threshold(program, largest - 1)
    assert set(with_static_threshold(program, largest).entries) == set(program.entries)


def test_static_prefills_need_a_dynamic_one_of_as_many_rows() -> None:
    """Without a packed `extend`; a dynamic prefill takes any length."""
    program = program_of(static_lengths=(16,), extend_rank=0)
    kept = with_static_threshold(program, 16).entries
    assert "prefill_bs1_s16" in kept
    assert "prefill_bs4_s16" not in kept
    assert "prefill_bs4" in kept


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize("depth", [0, 1])
def test_an_engine_gives_the_same_tokens_on_dynamic_entries(mode: str, depth: int) -> None:
    outputs = []
    for threshold in (None, 2, 0):
        rig = make_rig(
            mode=mode,
            depth=depth,
            static_threshold=threshold,
            static_lengths=(8,),
            extend_lengths=(4, 8),
            loop_sizes=(1, 2, 4, 8),
            sample_sizes=(8,),
        )
        for index in range(5):
            rig.engine.add(call(f"r{index}", PROMPT[index:], max_tokens=6))
        rig.run()
        outputs.append(rig.outputs)
        ran = [Entry.parse(name) for name, _ in rig.program.calls]
        assert all(entry is not None for entry in ran)
        sizes = [entry.bucket_tokens or 0 for entry in ran if entry is not None]
        assert max(sizes) <= 2 if threshold == 2 else (max(sizes) > 2) == (threshold is None)
        assert (rig.engine.stats().steps_ahead > 0) == (depth > 0)
    assert outputs[0] == outputs[1] == outputs[2]


def test_decodes_of_dynamic_entries_are_timed_and_warmed_up() -> None:
    rig = make_rig(static_threshold=0)
    assert {each.name for each in warm_up(rig.runner)} == {"prefill_bs1", "prefill_bs4", "extend"}
    assert decode_s(rig.runner, 1) >= 0
    assert {name for name, _ in rig.program.calls} == {"prefill_bs1", "prefill_bs4", "extend"}
    assert rig.runner.buckets.decode_of(3).rows == 3


def test_entries_that_are_off_take_no_memory() -> None:
    result = (TensorType((8, 1, 4), np.dtype(np.float32)),)
    program = program_of()
    small, large = (
        replace(program.entries[name], results=result, workspace_bytes=size)
        for name, size in (("decode_bs1", 64), ("decode_bs8", 1 << 20))
    )
    entries = {**program.entries, "decode_bs1": small, "decode_bs8": large}
    both = cast(Program, SimpleNamespace(entries=entries, submit=program.submit))
    assert owned_bytes(with_static_threshold(both, 8).entries) == 8 * 4 * 4 + (1 << 20)
    assert owned_bytes(with_static_threshold(both, 1).entries) == 8 * 4 * 4 + 64
    assert owned_bytes(with_static_threshold(both, 0).entries) == 0
