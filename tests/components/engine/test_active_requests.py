from __future__ import annotations

import pytest

from shortfin_apps.llm.components.request.messages import FinishReason, Terms
from shortfin_apps.llm.components.request.request import IllegalTransitionError, State
from shortfin_apps.llm.contract.errors import DeadlineExceededError, InvocationError
from tests.components.engine_fixture import PROMPT, call, make_rig
from tests.components.fake_device import greedy_continuation
from tests.components.stepped_engine import SteppedClock


def test_a_request_past_its_deadline_ends_with_its_tokens_so_far() -> None:
    clock = SteppedClock()
    rig = make_rig(max_running=1, clock=clock)
    rig.engine.add(call("runs", PROMPT[:4], max_tokens=20, terms=Terms(timeout_s=5)))
    rig.engine.add(call("waits", PROMPT, terms=Terms(timeout_s=3)))
    rig.engine.add(call("patient", PROMPT, max_tokens=2))
    for _ in range(6):
        rig.step()
        clock.now_s += 1
    assert (rig.reason("waits"), rig.outputs["waits"]) == (FinishReason.ABORT, [])
    assert (rig.reason("runs"), len(rig.outputs["runs"])) == (FinishReason.ABORT, 5)
    assert isinstance(rig.last["waits"].error, DeadlineExceededError)
    rig.run()
    assert rig.outputs["patient"] == greedy_continuation(PROMPT, 2)
    assert rig.all_pages_back()


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("started", [False, True])
def test_a_request_that_left_its_lifecycle_is_ended_alone(state: State, started: bool) -> None:
    """Whatever state a bug puts it in: the engine goes on and no page is lost."""
    rig = make_rig(strict=False, max_running=2)
    rig.engine.add(call("other", PROMPT, max_tokens=9))
    rig.step()
    rig.engine.add(call("wrong", PROMPT[2:], max_tokens=9))
    if started:
        rig.step()
    next(r for r in [*rig.scheduler.running, *rig.scheduler.waiting] if r.request_id == "wrong").state = state
    rig.run()
    assert rig.outputs["other"] == greedy_continuation(PROMPT, 9)
    if rig.reason("wrong") is not FinishReason.LENGTH:
        assert isinstance(rig.last["wrong"].error, InvocationError)
    assert rig.all_pages_back()
    assert not rig.scheduler.running
    assert not rig.scheduler.waiting


def test_a_request_that_left_its_lifecycle_raises_if_strict() -> None:
    rig = make_rig()
    rig.engine.add(call("a", PROMPT))
    next(iter(rig.scheduler.waiting)).state = State.FINISHED
    with pytest.raises(IllegalTransitionError, match="a: finished -> running"):
        rig.engine.step()
