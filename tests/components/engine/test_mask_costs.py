from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.components.engine.mask_costs import (
    MAX_DEBT_S,
    MAX_EXCESS_S,
    MAX_STEP_S,
    MIN_ROW_S,
    NUM_SPIKES,
    NUM_STEPS,
    MaskCosts,
)
from shortfin_apps.llm.components.request.messages import FinishReason, Terms
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.adjustments import allowed_next
from shortfin_apps.llm.contract.errors import ConstraintError
from tests.components.engine_fixture import PROMPT, call, make_rig
from tests.components.fake_device import VOCAB


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(eq=False)
class Costly:
    """A grammar and its matchers that allow every token. A mask takes `cost_s` of the token's index."""

    clock: Clock
    cost_s: Callable[[int], float]
    param: str = "guided_grammar"
    num_masks: int = 0
    forced_tokens: Sequence[int] = ()

    def matcher(self) -> Costly:
        return self

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
        self.num_masks += 1
        self.clock.now_s += self.cost_s(len(generated))
        return b"\xff" * (VOCAB // 8)

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        self.clock.now_s += self.cost_s(len(generated))
        return self.forced_tokens


@dataclass
class Steps:
    """Steps of requests that each need one mask; `seconds` has the cost of each step."""

    clock: Clock = field(default_factory=Clock)
    requests: dict[str, Request] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    ended: dict[str, ConstraintError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.costs = MaskCosts(self.clock, self.clock)

    def add(self, name: str, grammar: Costly, tenant: str = "") -> None:
        request = Request(call(name, [1], 999, output_grammar=grammar, terms=Terms(tenant=tenant)))
        self.costs.watch(request)
        self.requests[name] = request

    def grammar(self, cost_s: float | Callable[[int], float]) -> Costly:
        return Costly(self.clock, cost_s if callable(cost_s) else lambda _: cost_s)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            before_s = self.clock.now_s
            for name, request in list(self.requests.items()):
                self._mask(name, request)
            self.seconds.append(self.clock.now_s - before_s)
            for name, error in self.costs.settle():
                if self.requests.pop(name, None) is not None:
                    self.ended[name] = error

    def _mask(self, name: str, request: Request) -> None:
        assert request.matcher is not None
        try:
            request.matcher.allowed(request.token_ids[1:])
        except ConstraintError as error:
            self.ended[name] = error
            del self.requests[name]
        request.token_ids.append(2)


def rows(steps: Steps, grammar: Costly, count: int, tenant: str = "") -> list[str]:
    names = [f"{tenant}{len(steps.requests)}.{index}" for index in range(count)]
    for name in names:
        steps.add(name, grammar, tenant)
    return names


def test_a_grammar_that_costs_too_much_ends_with_an_error_that_names_its_field() -> None:
    steps = Steps()
    costly = rows(steps, steps.grammar(0.008), 30)
    cheap = rows(steps, steps.grammar(0.0001), 30)
    steps.run(NUM_STEPS)
    assert set(steps.ended) == set(costly)
    assert list(steps.requests) == cheap
    assert {(error.param, "`guided_grammar`" in str(error)) for error in steps.ended.values()} == {
        ("guided_grammar", True)
    }


def test_a_step_that_becomes_costly_at_once_is_cut() -> None:
    steps = Steps()
    rows(steps, steps.grammar(lambda index: 0.033 if index > 20 else 0.0), 30)
    steps.run(24)
    assert not steps.requests
    assert max(steps.seconds) <= MAX_EXCESS_S + 0.034
    assert sum(steps.seconds) <= MAX_EXCESS_S + 0.034


def test_the_first_masks_of_a_new_grammar_may_be_slow() -> None:
    steps = Steps()
    for _ in range(8):
        rows(steps, steps.grammar(lambda index: 0.02 if index < NUM_SPIKES else 0.0001), 1)
    steps.run(30)
    assert not steps.ended


def test_the_costliest_end_until_the_others_fit() -> None:
    steps = Steps()
    few = rows(steps, steps.grammar(0.01), 1)
    many = rows(steps, steps.grammar(0.01), 4)
    middle = rows(steps, steps.grammar(0.01), 2, tenant="other")
    steps.run(60)
    assert set(steps.ended) == {*many, *middle}
    assert list(steps.requests) == few


def test_a_grammar_that_is_costly_every_other_token_ends_too() -> None:
    steps = Steps()
    rows(steps, steps.grammar(lambda index: 0.008 * (index % 2)), 30)
    steps.run(60)
    assert not steps.requests


def test_tenants_with_the_same_grammar_have_accounts_of_their_own() -> None:
    steps = Steps()
    grammar = steps.grammar(0.004)
    rows(steps, grammar, 30, tenant="a")
    one = rows(steps, grammar, 1, tenant="b")
    steps.run(60)
    assert list(steps.requests) == one


def test_a_large_batch_of_a_usual_grammar_that_shrinks_to_one_row_is_not_costly() -> None:
    steps = Steps()
    usual = steps.grammar(MIN_ROW_S / 2)
    names = rows(steps, usual, 100)
    steps.run(20)
    for name in names[1:]:
        del steps.requests[name]
    rows(steps, usual, 300, tenant="other")
    steps.run(3)
    assert not steps.ended


def test_forced_tokens_count_and_an_exhausted_grammar_forces_none() -> None:
    steps = Steps()
    grammar = steps.grammar(MAX_EXCESS_S * 2)
    grammar.forced_tokens = [7]
    steps.add("a", grammar)
    matcher = steps.requests["a"].matcher
    assert matcher is not None
    assert list(matcher.forced([])) == [7]
    assert list(matcher.forced([])) == []
    with pytest.raises(ConstraintError, match="simpler"):
        matcher.allowed([])
    assert steps.clock.now_s == MAX_EXCESS_S * 2
    steps.costs.settle()
    assert list(matcher.forced([])) == [7], "a step later it may cost time again"


@pytest.mark.parametrize(("wall_s", "cpu_s", "charged_s"), [(5e-5, 1.0, 5e-5), (9.0, 0.02, 0.02)])
def test_an_interruption_is_not_charged_and_a_brief_mask_reads_no_cpu_time(
    wall_s: float, cpu_s: float, charged_s: float
) -> None:
    wall, cpu = Clock(), Clock()
    grammar = Costly(wall, lambda _: wall_s)
    costs = MaskCosts(cpu, wall)
    request = Request(call("a", [1], 9, output_grammar=grammar))
    costs.watch(request)
    costs.settle()
    cpu.now_s += cpu_s
    allowed_next(request)
    assert costs._accounts[("", grammar)].spent_s == pytest.approx(charged_s)


def test_a_mask_that_a_draw_waits_for_is_computed_once_with_the_forced_tokens() -> None:
    steps = Steps()
    grammar = steps.grammar(0.01)
    steps.add("a", grammar)
    request = steps.requests["a"]
    request.next_mask.is_awaited = True
    assert request.matcher is not None
    assert list(request.matcher.forced(request.output)) == []
    assert allowed_next(request) == allowed_next(request)
    assert (grammar.num_masks, steps.costs._accounts[("", grammar)].spent_s) == (1, 0.02)
    allowed_next(request, ahead=[5])
    allowed_next(request)
    assert grammar.num_masks == 3, "a mask after proposed tokens replaces it"
    request.token_ids.append(2)
    allowed_next(request)
    assert grammar.num_masks == 4


def test_a_mask_that_fails_ahead_fails_when_it_is_needed() -> None:
    clock = Clock()

    class Failing(Costly):
        def matcher(self) -> Failing:
            return self

        def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
            raise ConstraintError("too complex")

    steps = Steps(clock)
    steps.add("a", Failing(clock, lambda _: 0.0))
    request = steps.requests["a"]
    request.next_mask.is_awaited = True
    assert request.matcher is not None
    assert list(request.matcher.forced(request.output)) == []
    with pytest.raises(ConstraintError, match="complex"):
        allowed_next(request)


def burst(steps: Steps, cost_s: float, num_rows: int, tenant: str) -> None:
    """Requests of a new grammar that end before their account knows what they cost."""
    names = rows(steps, steps.grammar(cost_s), num_rows, tenant)
    steps.run(NUM_SPIKES)
    for name in names:
        steps.requests.pop(name, None)


def test_short_requests_in_a_row_are_no_way_to_take_much_of_every_step() -> None:
    steps = Steps()
    usual = rows(steps, steps.grammar(MIN_ROW_S / 2), 9, tenant="usual")
    for _ in range(40):
        burst(steps, 0.004, 50, "a")
    allowed_s = MAX_STEP_S + MIN_ROW_S * 59
    assert sum(max(0.0, each - allowed_s) for each in steps.seconds) < 2 * MAX_DEBT_S
    assert max(steps.seconds[-9:]) < allowed_s
    late = rows(steps, steps.grammar(lambda index: 0.02 if index < NUM_SPIKES else 0.0), 1, tenant="b")
    steps.run(NUM_STEPS)
    assert list(steps.requests) == [*usual, *late], "other tenants may have slow first masks"


def test_a_debt_is_paid_by_steps() -> None:
    steps = Steps()
    for _ in range(20):
        burst(steps, 0.004, 50, "a")
    assert steps.costs._indebted
    steps.run(round(2 * MAX_DEBT_S / MAX_STEP_S) + 1)
    assert not steps.costs._indebted
    steps.ended.clear()  # with the frames of the errors
    assert not len(steps.costs._tenants)
    burst(steps, 0.004, 30, "a")
    assert not steps.ended


def test_an_account_ends_with_its_requests() -> None:
    steps = Steps()
    rows(steps, steps.grammar(0.0), 3)
    steps.run(1)
    steps.requests.clear()
    assert not len(steps.costs._accounts)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 0.04), st.integers(1, 9), st.integers(0, 9)), max_size=4),
    st.integers(1, 30),
)
def test_the_excess_over_many_steps_is_bounded(kinds: list[tuple[float, int, int]], num_steps: int) -> None:
    """Whatever the mix; and usual grammars never end."""
    steps = Steps()
    usual = rows(steps, steps.grammar(MIN_ROW_S * 0.99), 9)
    for cost_s, count, after in kinds:
        rows(steps, steps.grammar(partial(_costs_after, cost_s, after)), count)
    steps.run(num_steps)
    assert set(usual) <= set(steps.requests)
    allowed_s = MAX_STEP_S + MIN_ROW_S * (9 + sum(count for _, count, _ in kinds))
    most_s = sum(min(MAX_EXCESS_S + cost_s, cost_s * count) for cost_s, count, _ in kinds)
    unproven_steps = (NUM_SPIKES + 1) * len(kinds)
    excess_s = sum(max(0.0, each - allowed_s) for each in steps.seconds)
    assert excess_s <= MAX_EXCESS_S + unproven_steps * most_s + 1e-6


def _costs_after(cost_s: float, after: int, index: int) -> float:
    return cost_s if index >= after else 0.0


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
def test_the_engine_ends_costly_requests_and_goes_on_with_the_others(mode: str) -> None:
    clock = Clock()
    rig = make_rig(
        mask_costs=MaskCosts(clock, clock), mode=mode, token_budget=64 if mode != "default" else None
    )
    costly = Costly(clock, lambda index: 0.02 if index > 3 else 0.0)
    for index in range(4):
        rig.engine.add(call(f"costly{index}", PROMPT, 60, output_grammar=costly))
    rig.engine.add(call("other", PROMPT, 60, output_grammar=Costly(clock, lambda _: 0.0001)))
    rig.run()
    for index in range(4):
        error = rig.last[f"costly{index}"].error
        assert isinstance(error, ConstraintError)
        assert error.param == "guided_grammar"
    assert rig.reason("other") is FinishReason.LENGTH
    assert len(rig.outputs["other"]) == 60
    assert rig.all_pages_back()
    assert clock.now_s < 2.0
