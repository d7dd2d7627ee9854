from __future__ import annotations

import numpy as np
import pytest

from shortfin_apps.llm.components.request.messages import Delta, FinishReason, TokenLogprobs
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.errors import DeadlineExceededError, InvalidRequestError, RequestAbortedError
from shortfin_apps.llm.serving.frontend.prompt_scoring import prompt_logprobs, scoring_request
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta, TextRequest
from tests.components.engine_fixture import PROMPT, Rig, call, make_rig
from tests.components.fake_device import fake_config, fake_logits

REQUEST = TextRequest(
    request_id="r",
    prompt_token_ids=tuple(PROMPT),
    params=SamplingParams(max_tokens=3, temperature=1.0, stop_token_ids=frozenset({5})),
    stop=("a",),
)


def scores_of(rig: Rig, request: TextRequest) -> list[TokenLogprobs]:
    rig.engine.check(request.call("scored"))
    rig.engine.add(request.call("scored"))
    deltas: list[Delta] = []
    while rig.engine.has_work:
        step = rig.engine.step()
        rig.take(step)
        deltas += [delta for delta in step if delta.request_id == "scored"]
    return [logprobs for delta in deltas for logprobs in delta.logprobs]


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize("pages", [32, 10])
@pytest.mark.parametrize("start", [0, 1, 7])
def test_scores_are_the_models_log_probabilities(start: int, pages: int, mode: str) -> None:
    """Of every token of the prompt, end-of-sequence too, beside others, also when it is preempted."""
    rig = make_rig(fake_config(pages=pages), mode=mode, loop_sizes=(1, 2, 4, 8), eos=frozenset({9}))
    for other in range(2):
        rig.engine.add(call(str(other), PROMPT[other + 3 :], 12, ignore_eos=True))
    request = scoring_request(REQUEST, 2, start)
    assert request is not None
    scores = scores_of(rig, request)
    assert rig.outputs["scored"] == PROMPT[max(1, start) :]
    for position, got in enumerate(scores, max(1, start)):
        logits = fake_logits(PROMPT[:position]).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert got.logprob == pytest.approx(expected[PROMPT[position]])
        assert got.rank == 1 + (expected > expected[PROMPT[position]]).sum()
        assert [token_id for token_id, _ in got.top] == np.argsort(-expected)[:2].tolist()
    assert (rig.scheduler.num_preemptions > 0) is (pages == 10)


def test_the_first_token_has_no_score() -> None:
    request = TextRequest(request_id="r", prompt_token_ids=(7,), params=REQUEST.params)
    assert scoring_request(request, 1) is None
    assert prompt_logprobs((7,), None) == (None,)
    assert prompt_logprobs((), None) == ()


def test_an_answer_that_ended_early_is_an_error() -> None:
    late = DeadlineExceededError("late")
    with pytest.raises(DeadlineExceededError):
        prompt_logprobs((7, 8), TextDelta("", (), finish_reason=FinishReason.ABORT, error=late))
    with pytest.raises(RequestAbortedError):
        prompt_logprobs((7, 8), TextDelta("", (), finish_reason=FinishReason.ABORT))


def test_a_model_without_logits_refuses_by_name() -> None:
    rig = make_rig(logits_result=False)
    request = scoring_request(REQUEST, 0)
    assert request is not None
    with pytest.raises(InvalidRequestError) as caught:
        rig.engine.check(request.call("scored"))
    assert caught.value.param == "prompt_logprobs"
