"""Extend entries: tasks of every length in one invocation, against the reference and the other entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.model.reference.forward import forward
from tests.builder.compiled_model import NAN_BYTE, OTHERS, TINY, CompiledModel, Result, block_table

pytestmark = pytest.mark.slow

STRIDE = 16
BUCKET = 64
SLOTS = 7  # of the table of last tokens
TOLERANCE = {"f32": 3e-5, "bf16": 0.1}  # as in test_graph.py

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Task:
    """A sequence of `seq_len` tokens of which those before `start` are in the cache."""

    start: int
    seq_len: int


@st.composite
def decodes(draw: st.DrawFn) -> Task:
    start = draw(st.integers(0, 100))
    return Task(start, start + 1)


@st.composite
def chunks(draw: st.DrawFn) -> Task:
    start = draw(st.integers(0, 3)) * STRIDE
    return Task(start, start + draw(st.integers(1, 50)))


@pytest.fixture(params=["f32", "bf16", *OTHERS, "routed"])
def model(request: pytest.FixtureRequest, models: dict[str, CompiledModel]) -> CompiledModel:
    chosen: CompiledModel = models[request.param]
    chosen.fill_cache(NAN_BYTE)
    return chosen


def pages_for(length: int) -> int:
    return -(-length // STRIDE)


def tables(rng: np.random.Generator, tasks: list[Task]) -> Tokens:
    pages = [pages_for(task.seq_len) for task in tasks]
    return block_table(rng, pages, max(pages))


def prefill(model: CompiledModel, tokens: Tokens, start: int, end: int, blocks: Tokens) -> Result:
    """Tokens `start` to `end` of a sequence, from a page's first slot on."""
    padded = np.zeros((1, pages_for(end - start) * STRIDE), np.int64)
    padded[0, : end - start] = tokens[start:end]
    return model.prefill("prefill_bs1", padded, np.array([start]), np.array([end]), blocks)


def extend(
    model: CompiledModel,
    tasks: list[Task],
    sequences: list[Tokens],
    blocks: Tokens,
    entry: Literal["extend", "extend_t64"] = "extend",
    padding: int = 0,
    last_tokens: dict[int, int] | None = None,
) -> Result:
    """`last_tokens`: the slot of each token that is read from the table, by its place among the tokens."""
    parts = [sequence[task.start :] for task, sequence in zip(tasks, sequences, strict=True)]
    packed = np.concatenate([*parts, np.full(padding, 3, np.int64)])
    if entry == "extend_t64":
        packed = np.pad(packed, (0, BUCKET - len(packed)))
    table = np.full(SLOTS, -9)
    for place, slot in (last_tokens or {}).items():
        table[slot] = packed[place]
        packed[place] = -1 - slot
    offsets = np.cumsum([0, *map(len, parts)])[:-1]
    starts, seq_lens = (np.array([getattr(task, name) for task in tasks]) for name in ("start", "seq_len"))
    return model.extend(entry, packed, offsets, starts, seq_lens, blocks, table)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tasks=st.lists(decodes() | chunks(), min_size=1, max_size=5),
    padding=st.integers(0, 20),
    seed=st.integers(0, 99),
)
def test_any_mix_equals_the_reference_and_the_other_entries(
    model: CompiledModel, tasks: list[Task], padding: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, TINY.vocab_size, task.seq_len) for task in tasks]
    blocks = tables(rng, tasks)
    model.fill_cache(NAN_BYTE)
    for row, (task, sequence) in enumerate(zip(tasks, sequences, strict=True)):
        if task.start:
            prefill(model, sequence, 0, task.start, blocks[row : row + 1])
    before = model.read_cache().copy()
    small = sum(task.seq_len - task.start for task in tasks) <= BUCKET - padding
    result = extend(model, tasks, sequences, blocks, "extend_t64" if small else "extend", padding)
    after = model.read_cache().copy()

    written = {0}
    for row, (task, sequence) in enumerate(zip(tasks, sequences, strict=True)):
        expected = forward(model.spec, model.weights, sequence)[-1]
        tolerance = TOLERANCE[model.options.weights]
        np.testing.assert_allclose(result.logits[row], expected, rtol=0, atol=tolerance)
        written |= set(blocks[row, task.start // STRIDE : pages_for(task.seq_len)])
        alone = _alone(model, task, sequence, blocks[row : row + 1])
        np.testing.assert_array_equal(result.logits[row], alone.logits[0])
        np.testing.assert_array_equal(result.values[row], alone.values[0])
        np.testing.assert_array_equal(result.indices[row], alone.indices[0])
    assert set(np.flatnonzero((after != before).any(axis=1))) <= written


def _alone(model: CompiledModel, task: Task, sequence: Tokens, blocks: Tokens) -> Result:
    """The same task through the entries of the default mode, over the pages as extend left them."""
    if task.seq_len - task.start == 1:
        token = sequence[task.start :].reshape(1, 1)
        return model.decode("decode_bs1", token, np.array([task.start]), blocks)
    return prefill(model, sequence, task.start, task.seq_len, blocks)


@pytest.mark.parametrize("entry", ["extend", "extend_t64"])
def test_tokens_from_the_table_give_the_bits_of_the_tokens(
    model: CompiledModel, entry: Literal["extend", "extend_t64"]
) -> None:
    """Of decodes, and within a chunk."""
    rng = np.random.default_rng(2)
    tasks = [Task(20, 21), Task(0, 30), Task(0, 1), Task(33, 34)]
    sequences = [rng.integers(0, TINY.vocab_size, task.seq_len) for task in tasks]
    blocks = tables(rng, tasks)
    results = []
    for named in ({}, {0: SLOTS - 1, 1: 3, 17: 2, 32: 0}):
        model.fill_cache(NAN_BYTE)
        for row, (task, sequence) in enumerate(zip(tasks, sequences, strict=True)):
            if task.start:
                prefill(model, sequence, 0, task.start, blocks[row : row + 1])
        results.append(
            (extend(model, tasks, sequences, blocks, entry, last_tokens=named), model.read_cache())
        )
    (given, cache), (read, cache_of_read) = results
    np.testing.assert_array_equal(read.logits, given.logits)
    np.testing.assert_array_equal(read.indices, given.indices)
    np.testing.assert_array_equal(cache_of_read[1:], cache[1:])


def test_more_tasks_than_any_decode_entry_takes(model: CompiledModel) -> None:
    rng = np.random.default_rng(1)
    tasks = [Task(index % 16, index % 16 + 1) for index in range(39)]
    sequences = [rng.integers(0, TINY.vocab_size, task.seq_len) for task in tasks]
    blocks = tables(rng, tasks)
    for row, (task, sequence) in enumerate(zip(tasks, sequences, strict=True)):
        if task.start:
            prefill(model, sequence, 0, task.start, blocks[row : row + 1])
    result = extend(model, tasks, sequences, blocks)
    for row, sequence in enumerate(sequences):
        expected = forward(model.spec, model.weights, sequence)[-1]
        np.testing.assert_allclose(
            result.logits[row], expected, rtol=0, atol=TOLERANCE[model.options.weights]
        )


def test_an_invocation_of_padding_alone_touches_the_scratch_page_only(model: CompiledModel) -> None:
    """A server's warm-up invocation."""
    before = model.read_cache().copy()
    zeros = np.zeros(1, np.int64)
    model.extend(
        "extend_t64", np.zeros(BUCKET, np.int64), zeros, zeros, zeros + 1, np.zeros((1, 2), np.int64)
    )
    assert set(np.flatnonzero((model.read_cache() != before).any(axis=1))) == {0}
