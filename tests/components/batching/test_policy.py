"""Throughput and inter-token times of the batching modes, on simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from shortfin_apps.llm.components.batching.mode import DEFAULT_CHUNK_TOKENS, BatchSettings
from shortfin_apps.llm.components.invocation.buckets import FEW_ROWS
from tests.components.simulation import AMX, AVX512, CostModel, Simulation

NUM_DECODES = 8
LONG_TOKENS = 4096
# The bench's presets: prompt lengths, tokens out, clients.
W1 = ([128] * 3, 128, 1)
W2 = ([128] * 8, 128, 8)
W3 = (list(range(16, 513, 16)), 64, 32)
DEFAULT, EXTEND = BatchSettings(batch_mode="default"), BatchSettings(batch_mode="extend-attention")
MODES = pytest.mark.parametrize("mode", [DEFAULT, EXTEND], ids=["default", "extend-attention"])
MODELS = {"avx512": AVX512, "amx": AMX}


@pytest.fixture(params=list(MODELS.values()), ids=list(MODELS))
def cost(request: pytest.FixtureRequest) -> CostModel:
    chosen: CostModel = request.param
    return chosen


# The default mode with chunks of one size, as upstream's servers cut prompts.
FIXED = BatchSettings(batch_mode="default", chunk_tokens=DEFAULT_CHUNK_TOKENS)


def served(cost: CostModel, mode: BatchSettings, workload: tuple[Sequence[int], int, int]) -> Simulation:
    lengths, output_tokens, clients = workload
    simulation = Simulation(cost, mode)
    simulation.serve(lengths, output_tokens, clients)
    return simulation


def p99(gaps_s: Sequence[float]) -> float:
    return float(np.percentile(gaps_s, 99))


@pytest.mark.parametrize("workload", [W1, W2, W3], ids=["W1", "W2", "W3"])
def test_mixing_is_not_slower(cost: CostModel, workload: tuple[Sequence[int], int, int]) -> None:
    default, extend = (served(cost, mode, workload) for mode in (DEFAULT, EXTEND))
    assert extend.clock.now_s < 1.01 * default.clock.now_s


def test_beside_many_prompts_a_budget_shortens_the_time_between_tokens(cost: CostModel) -> None:
    """To two thirds in the default mode, at equal throughput, and to less than half in extend-attention."""
    fixed = served(cost, FIXED, W3)
    default, extend = (served(cost, mode, W3) for mode in (DEFAULT, EXTEND))
    assert p99(default.gaps_s()) < p99(fixed.gaps_s()) * 2 / 3
    assert default.clock.now_s < 1.01 * fixed.clock.now_s
    assert p99(extend.gaps_s()) < p99(fixed.gaps_s()) / 2


@MODES
@pytest.mark.parametrize("clients", [1, 2, 3, 4, 8])
def test_the_default_buckets_hardly_pad_prompts_of_whole_pages(mode: BatchSettings, clients: int) -> None:
    """A quarter of the rows where three run in a bucket of four, none otherwise."""
    simulation = Simulation(AMX, mode)
    simulation.serve([128] * 8, 32, clients)
    entries = simulation.engine.stats().entries
    prefills = [counts for entry, counts in entries.items() if not entry.startswith("decode")]
    padded = sum(counts.padded_tokens for counts in prefills)
    assert padded == 0 or (clients == 3 and padded <= sum(c.prefill_tokens.total for c in prefills) / 3)


@MODES
def test_a_single_prompt_is_cut_into_few_chunks(cost: CostModel, mode: BatchSettings) -> None:
    simulation = served(cost, mode, ([1024], 1, 1))
    assert simulation.engine.stats().steps == 2


def test_a_short_prompt_does_not_wait_for_a_long_one(cost: CostModel) -> None:
    """At most three prefill invocations and their decodes: a current one, one between, and its own."""
    simulation = Simulation(cost, DEFAULT)
    add_decodes(simulation)
    simulation.run_until(lambda: all(simulation.times_s.values()))
    simulation.add("long", LONG_TOKENS, 1)
    simulation.step()
    simulation.add("short", 200, 1)
    steps_before = simulation.engine.stats().steps
    simulation.run_until(lambda: bool(simulation.times_s["short"]))
    assert simulation.engine.stats().steps - steps_before <= 6
    assert not simulation.times_s["long"]


def test_with_measured_budgets_mixing_shortens_the_gaps_of_a_burst_at_equal_throughput(
    cost: CostModel,
) -> None:
    """Eight prompts of W2, of which the first step computes only the first, as over HTTP."""
    simulations = [Simulation(cost, mode) for mode in (DEFAULT, EXTEND)]
    for simulation in simulations:
        simulation.engine.tune(on_gpu=False)
        begin_s = simulation.clock.now_s
        simulation.add("first", 128, 128)
        simulation.step()
        simulation.serve([128] * 7, 128, 7)
        simulation.clock.now_s -= begin_s
    default, extend = simulations
    assert p99(extend.gaps_s()) < 0.75 * p99(default.gaps_s())
    assert extend.clock.now_s < 1.02 * default.clock.now_s


def test_mixing_pads_only_few_decodes(cost: CostModel) -> None:
    entries = served(cost, EXTEND, W3).engine.stats().entries
    padded = {entry for entry, counts in entries.items() if counts.padded_tokens}
    assert padded <= {f"decode_bs{rows}" for rows in range(FEW_ROWS + 1)}


def test_mixing_gives_more_tokens_where_rows_are_cheap_beside_the_weights() -> None:
    """A sixth more at W3, when a row takes less than a hundredth of the time to read the weights."""
    cheap = replace(AMX, row_s=0.08e-3, decode_row_s=0.08e-3, key_s=0.1e-6)
    default, extend = (served(cheap, mode, W3) for mode in (DEFAULT, EXTEND))
    assert default.clock.now_s > 1.17 * extend.clock.now_s


@pytest.mark.parametrize("budget", [192, 256])
@pytest.mark.parametrize("decodes_first", [True, False])
def test_beside_a_long_prompt_decodes_wait_less_than_twice_the_budgets_time(
    cost: CostModel, budget: int, decodes_first: bool
) -> None:
    """The budget's time is how long as many tokens take at the beginning of a prompt."""
    simulation = Simulation(cost, BatchSettings(batch_mode="extend-attention", token_budget=budget))
    if decodes_first:
        add_decodes(simulation)
        simulation.run_until(lambda: all(len(times) > 20 for times in simulation.times_s.values()))
        simulation.add("long", LONG_TOKENS, 1)
    else:
        simulation.add("long", LONG_TOKENS, 1)
        simulation.step()
        add_decodes(simulation)
    begin_s = simulation.clock.now_s
    simulation.run_until(lambda: bool(simulation.times_s["long"]))
    gaps = [
        after - before
        for times in simulation.times_s.values()
        for before, after in pairwise(times)
        if after > begin_s
    ]
    assert len(gaps) > NUM_DECODES * LONG_TOKENS / budget / 2, "the decodes stalled"
    assert p99(gaps) < 2 * cost.invocation_s("extend", budget, budget * budget // 2)


def add_decodes(simulation: Simulation) -> None:
    for index in range(NUM_DECODES):
        simulation.add(f"decode {index}", 32, 1000)
