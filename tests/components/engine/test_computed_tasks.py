"""Deltas of traced requests tell when their tasks were computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.messages import ComputedTask
from tests.components.engine_fixture import Rig, call, make_rig
from tests.components.fake_device import fake_config, greedy_continuation


def run(rig: Rig) -> dict[str, list[ComputedTask]]:
    """Runs all requests; returns what their deltas tell."""
    told: dict[str, list[ComputedTask]] = {}
    while rig.engine.has_work:
        deltas = rig.engine.step()
        rig.take(deltas)
        for delta in deltas:
            told.setdefault(delta.request_id, []).extend(delta.computed)
    return told


def covered(tasks: Sequence[ComputedTask]) -> set[int]:
    return {
        position
        for task in tasks
        for position in range(task.start_position, task.start_position + task.num_tokens)
    }


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    traced=st.sets(st.integers(0, 4)),
    chunk_tokens=st.sampled_from([4, 8, 16]),
    pages=st.sampled_from([14, 64]),
    loop_sizes=st.sampled_from([(), (2, 8)]),
    mode=st.sampled_from(["default", "extend-attention"]),
)
def test_traced_requests_and_no_others_tell_when_every_token_was_computed(
    lengths: list[int],
    traced: set[int],
    chunk_tokens: int,
    pages: int,
    loop_sizes: tuple[int, ...],
    mode: str,
) -> None:
    rig = make_rig(fake_config(pages=pages), chunk_tokens=chunk_tokens, loop_sizes=loop_sizes, mode=mode)
    prompts = [[index + 1] * length for index, length in enumerate(lengths)]
    for index, prompt in enumerate(prompts):
        rig.engine.add(replace(call(str(index), prompt, max_tokens=10), is_traced=index in traced))
    told = run(rig)
    for index, prompt in enumerate(prompts):
        tasks = told[str(index)]
        assert rig.outputs[str(index)] == greedy_continuation(prompt, 10)
        if index not in traced:
            assert tasks == []
            continue
        cached = rig.last[str(index)].num_cached_tokens
        last = len(prompt) + 10 - 1  # whose task is never run
        assert set(range(cached, len(prompt))) <= covered(tasks) <= set(range(last))
        assert last - 1 in covered(tasks), "the last token's task is always told"
        assert all(task.began_s <= task.ended_s for task in tasks)
        assert all(task.device_before_s <= task.device_after_s for task in tasks)
        assert [task.began_s for task in tasks] == sorted(task.began_s for task in tasks)
        assert all(1 <= task.batch_tasks <= len(prompts) for task in tasks)


def test_a_preempted_request_tells_what_it_computed_again() -> None:
    rig = make_rig(fake_config(pages=11), max_running=6)
    for index in range(6):
        prompt = [index + 1] * (2 * index + 3)
        rig.engine.add(replace(call(str(index), prompt, max_tokens=20), is_traced=True))
    told = run(rig)
    assert rig.engine.stats().preemptions > 0
    again = [
        task
        for index in range(6)
        for task in told[str(index)]
        if task.num_tokens > 1 and task.start_position + task.num_tokens > 2 * index + 3
    ]
    assert again, "tokens of output were computed again, several at once"


def test_an_aborted_request_tells_what_was_computed_of_it() -> None:
    rig = make_rig(chunk_tokens=4)
    rig.engine.add(replace(call("a", [1] * 16), is_traced=True))
    rig.engine.step()
    last = rig.engine.abort("a")
    assert last is not None
    [task] = last.computed
    assert (task.start_position, task.num_tokens, task.entry_family) == (0, 4, "prefill")
