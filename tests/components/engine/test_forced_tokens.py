"""Tokens that a grammar forces are appended without a draw: the answers stay the same, in fewer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.components.request.messages import Delta, FinishReason
from shortfin_apps.llm.components.sampling.sampler import MAX_FORCED_TOKENS
from shortfin_apps.llm.components.speculation.options import SpeculationOptions
from tests.components.engine.test_speculation import answers
from tests.components.engine_fixture import PROMPT, Rig, call, make_draft, make_rig
from tests.components.fake_device import VOCAB, fake_config
from tests.components.forcing_grammar import Keys, thought_of

MODES = ("default", "extend-attention")
SIZES = (1, 2, 4, 8)
ON_DEVICE: dict[str, Any] = {"loop_sizes": SIZES, "sample_sizes": SIZES, "adjusted_sample_sizes": SIZES}
PLACES: list[dict[str, Any]] = [{}, {"loop_sizes": SIZES, "sample_sizes": SIZES}, ON_DEVICE]
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.0, "seed": 9, "repetition_penalty": 1.2},
    {"temperature": 0.8, "seed": 2, "top_k": 3, "presence_penalty": 1.5},
    {"logit_bias": ((3, 50.0), (9, -50.0)), "temperature": 0.7, "seed": 1},
    {"stop_token_ids": frozenset({3, 8, 20})},
    {"bad_words": ((5,), (6, 7)), "temperature": 0.9, "seed": 6},
    {"allowed_token_ids": frozenset(range(28)), "temperature": 0.9, "seed": 7},
    {"logprobs": 1, "temperature": 0.9, "seed": 8},
    {"chosen_logits": True},
    {"forced_token_ids": (1, 2, 3, 1, 2, 3)},
]
EOS = 11
GRAMMARS = (
    None,
    Keys(),
    thought_of(0, eos=EOS),
    thought_of(6, eos=EOS),
    thought_of(3, begins=("!",), eos=EOS),
)
FORCED = call("a", PROMPT, 40, output_grammar=Keys(), temperature=1.0, seed=2)


class Constant:
    """A grammar of one output."""

    param = "grammar"

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = [*token_ids]

    def matcher(self) -> Constant:
        return self

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
        following = self.forced([*generated, *ahead])
        return np.packbits([i in following[:1] for i in range(VOCAB)], bitorder="little").tobytes()

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        return self._token_ids[len(generated) :]


def tokens_of(rig: Rig, request_id: str = "a") -> list[int]:
    return rig.outputs.get(request_id, [])


def check_counts(rig: Rig) -> None:
    """What requests have planned and drawn is what is in flight."""
    drawing = dict.fromkeys(rig.scheduler.running, 0)
    for step in rig.engine._pipeline._steps:
        for task in step.batch.tasks:
            if task.request in drawing and not task.has_left and not task.num_ahead:
                drawing[task.request] += task.completes
    for request, count in drawing.items():
        assert request.num_drawing == count
        assert request.num_computed <= request.num_planned <= request.num_tokens


def noted_batches(rig: Rig) -> list[Batch]:
    batches: list[Batch] = []
    launch = rig.engine._pipeline.launch

    def noting(batch: Batch, began_s: float) -> None:
        batches.append(batch)
        launch(batch, began_s)

    rig.engine._pipeline.launch = noting  # type: ignore[method-assign]
    return batches


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, len(PARAMS) - 1),
            st.sampled_from(GRAMMARS),
            st.integers(1, 30),
            st.integers(1, 30),
            st.integers(0, 20),
        ),
        min_size=1,
        max_size=6,
    ),
    place=st.sampled_from(PLACES),
    depth=st.integers(0, 2),
    drafts=st.sampled_from([None, "lookup", "model"]),
    pages=st.sampled_from([17, 20, 64]),
    window=st.none() | st.integers(1, 12),
    mode=st.sampled_from(MODES),
    extend_rank=st.sampled_from([1, 1, 2]),
    prefix_cache=st.sampled_from(["none", "trie"]),
    token_budget=st.sampled_from([8, 12, 40]),
)
def test_answers_are_those_of_draws(
    requests: list[tuple[int, Grammar | None, int, int, int]],
    place: dict[str, Any],
    depth: int,
    drafts: str | None,
    pages: int,
    window: int | None,
    extend_rank: int,
    **options: Any,
) -> None:
    """With other requests, in few pages, ahead of tokens, and with proposals."""
    rng = np.random.default_rng(7)
    stem = rng.integers(0, 4, 30).tolist()
    calls = [
        call(str(i), stem[:length], count, **PARAMS[kind], output_grammar=grammar)
        for i, (kind, grammar, length, count, _) in enumerate(requests)
    ]
    options |= {"repeats": 0.5, "eos": frozenset({EOS})}

    def config() -> Any:
        return fake_config(pages=pages, window=window)

    expected = answers(make_rig(config(), jump_ahead=False, depth=0, **options), calls)
    if drafts is not None and extend_rank == 1:
        count = 4 if drafts == "lookup" else 0
        options["speculation"] = SpeculationOptions(max_tokens=count, row_cost=0)
        if drafts == "model":
            options["draft"] = make_draft(fake_config(pages=64), repeats=0.5, errs=0.3)
    made = make_rig(config(), depth=depth, extend_rank=extend_rank, **place, **options)
    step = made.engine.step

    def checked() -> list[Delta]:
        deltas = step()
        check_counts(made)
        return deltas

    made.engine.step = checked  # type: ignore[method-assign]
    assert answers(made, calls, [arrival for *_, arrival in requests]) == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_token_and_what_it_forces_take_one_invocation(mode: str) -> None:
    drawn, jumping = (make_rig(fake_config(pages=64), mode=mode, jump_ahead=on) for on in (False, True))
    assert answers(drawn, [FORCED]) == answers(jumping, [FORCED])
    tokens = jumping.outputs["a"]
    num_forced = sum(bool(Keys().forced(tokens[:i])) for i in range(1, len(tokens)))
    assert num_forced > 15
    assert len(jumping.program.calls) == len(drawn.program.calls) - num_forced
    assert jumping.engine.stats().generation_tokens == len(tokens)


@pytest.mark.parametrize("mode", MODES)
def test_known_tokens_take_a_step_each_where_rows_cannot_share_an_invocation(mode: str) -> None:
    """But no draw."""
    rank = 0 if mode == "default" else 2
    drawn, jumping = (
        make_rig(fake_config(pages=64), mode=mode, extend_rank=rank, sample_sizes=SIZES, jump_ahead=on)
        for on in (False, True)
    )
    batches = noted_batches(jumping)
    assert answers(drawn, [FORCED]) == answers(jumping, [FORCED])
    assert all(len(batch.tasks) == 1 for batch in batches)
    assert sum(task.completes for batch in batches for task in batch.tasks) < len(batches) / 1.5


def test_a_mask_after_forced_tokens_is_computed_while_the_device_runs() -> None:
    rig = make_rig(fake_config(pages=64))
    in_flight: list[int] = []

    class Noted(Keys):
        def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
            in_flight.append(len(rig.program.in_flight))
            return super().allowed(generated, ahead)

    batches = noted_batches(rig)
    answers(rig, [replace(FORCED, params=replace(FORCED.params, output_grammar=Noted()))])
    assert any(len(batch.tasks) > 2 for batch in batches)
    assert in_flight.count(1) == sum(batch.tasks[-1].completes for batch in batches)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [1, 2])
def test_grammars_run_ahead(mode: str, depth: int) -> None:
    """While one step runs, the next one is queued, except at the start."""
    rig = make_rig(fake_config(pages=64), mode=mode, depth=depth, token_budget=40, **ON_DEVICE)
    batches = noted_batches(rig)
    calls = [
        call(str(i), PROMPT[i:], 40, output_grammar=Keys(), temperature=1.0, seed=i + 3) for i in range(3)
    ]
    answers(rig, calls)
    assert rig.engine.stats().steps_ahead > 0.8 * len(batches)
    assert any(len(batch.tasks) > 3 for batch in batches)
    assert any(task.is_unknown for batch in batches for task in batch.tasks)


@pytest.mark.parametrize("place", PLACES)
def test_a_run_ends_at_max_tokens_and_at_stop_tokens(place: dict[str, Any]) -> None:
    everything = make_rig(fake_config(pages=64), jump_ahead=False)
    answers(everything, [FORCED])
    tokens = everything.outputs["a"]
    for count in range(1, len(tokens) + 1):
        rig = make_rig(fake_config(pages=64), **place)
        rig.engine.add(replace(FORCED, params=replace(FORCED.params, max_tokens=count)))
        rig.run()
        assert (rig.outputs["a"], rig.reason("a")) == (tokens[:count], FinishReason.LENGTH)
        assert rig.engine.stats().discarded_tokens <= 1
    for stop in set(tokens):
        by_model, by_request = frozenset({stop}), frozenset[int]()
        for eos, stops in ((by_model, by_request), (by_request, by_model)):
            rig = make_rig(fake_config(pages=64), eos=eos, **place)
            params = replace(FORCED.params, stop_token_ids=stops)
            rig.engine.add(replace(FORCED, params=params))
            rig.run()
            assert rig.outputs["a"] == tokens[: tokens.index(stop) + 1]
            assert rig.reason("a") is FinishReason.STOP
            assert rig.last["a"].stop_token_id == (stop if stops else None)
            assert rig.all_pages_back()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_appends_at_most_so_many(mode: str) -> None:
    constant = [i * 7 % VOCAB for i in range(2 * MAX_FORCED_TOKENS + 9)]
    rig = make_rig(fake_config(pages=64, max_seq_len=128), mode=mode, **ON_DEVICE)
    rig.engine.add(call("a", PROMPT, len(constant), output_grammar=Constant(constant)))
    sizes = []
    while rig.engine.has_work:
        deltas = rig.engine.step()
        assert all(len(delta.token_ids) == 1 for delta in deltas)
        rig.take(deltas)
        sizes.append(len(deltas))
    assert max(sizes) == MAX_FORCED_TOKENS + 1
    assert rig.outputs["a"] == constant


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_abort_at_any_token_returns_the_pages(mode: str, depth: int) -> None:
    plain = make_rig(jump_ahead=False)
    tokens = {name: tokens for name, (tokens, *_) in answers(plain, [FORCED]).items()}["a"]
    for num_steps in range(30):
        rig = make_rig(fake_config(pages=24), mode=mode, depth=depth, **ON_DEVICE)
        rig.engine.add(FORCED)
        rig.engine.add(call("b", PROMPT[4:], 30))
        for _ in range(num_steps):
            rig.step()
        rig.take([delta for delta in [rig.engine.abort("a")] if delta is not None])
        rig.run()
        assert tokens_of(rig) == tokens[: len(tokens_of(rig))]
        assert rig.all_pages_back()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_preemption_at_any_token_changes_nothing(mode: str, depth: int) -> None:
    plain = make_rig(jump_ahead=False)
    expected = answers(plain, [FORCED])["a"][0]
    for num_steps in range(1, 20):
        rig = make_rig(fake_config(pages=64), mode=mode, depth=depth, **ON_DEVICE)
        rig.engine.add(FORCED)
        for _ in range(num_steps):
            rig.step()
        rig.engine.preempt("a")
        check_counts(rig)
        rig.run()
        assert rig.outputs["a"] == expected


def spoils(rig: Rig, number: int, row: int) -> None:
    rig.program.faults.spoil = lambda spoiled: spoiled == row and len(rig.program.calls) == number


def breaks(rig: Rig, number: int, row: int) -> None:
    def broken(entry: str) -> None:
        if len(rig.program.calls) == number:
            raise RuntimeError("broken")

    rig.program.faults.before = broken


@pytest.mark.parametrize("fault", [spoils, breaks])
@pytest.mark.parametrize("reads_masked", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_fault_in_any_row_ends_its_request_alone(
    fault: Callable[[Rig, int, int], None], reads_masked: bool, mode: str, depth: int
) -> None:
    """And later requests, which get its pages, read nothing of it."""
    both = [FORCED, call("b", PROMPT[4:], 30)]
    later = call("c", PROMPT[2:], 8)
    expected = answers(make_rig(jump_ahead=False), [*both, later])
    num_failed = 0
    for number in range(3, 20):
        rig = make_rig(fake_config(pages=24), mode=mode, depth=depth, reads_masked=reads_masked, **ON_DEVICE)
        fault(rig, number, number % 5)
        for each in both:
            rig.engine.add(each)
        rig.run()
        rig.engine.add(later)
        rig.run()
        num_failed += sum(last.finish_reason is FinishReason.ERROR for last in rig.last.values())
        for name, (tokens, *_) in expected.items():
            got = tokens_of(rig, name)
            assert got == tokens[: len(got)]
            assert len(got) == len(tokens) or rig.reason(name) is FinishReason.ERROR
        assert rig.reason("c") is FinishReason.LENGTH
        assert rig.all_pages_back()
    assert num_failed > 3
