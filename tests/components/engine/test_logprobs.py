"""Log-probabilities from the device: the same bits as from the host, and steps run ahead."""

from __future__ import annotations

from typing import Any

import pytest

from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall, TokenLogprobs
from tests.components.engine_fixture import PROMPT, Rig, call, make_rig
from tests.components.fake_device import VOCAB, fake_config

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 1.0, "logprobs": 4, "chosen_logits": True},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.0, "frequency_penalty": 0.7, "logit_bias": ((3, 5.0),), "logprobs": 4},
    {"temperature": 0.0, "bad_words": ((5,), (7,)), "logprobs": 1},
    {"temperature": 1.0},
    {"temperature": 0.8, "allowed_token_ids": frozenset(range(3, 30)), "chosen_logits": True},
]
SIZES = (1, 2, 4, 8)
DRAWS: dict[str, Any] = {"loop_sizes": SIZES, "sample_sizes": SIZES, "adjusted_sample_sizes": SIZES}
Answer = tuple[list[int], list[TokenLogprobs], list[float]]


def calls() -> list[GenerateCall]:
    return [call(str(i), PROMPT[i:], 12, seed=i, **kind) for i, kind in enumerate(KINDS)]


def rig(**options: Any) -> Rig:
    return make_rig(**{"config": fake_config(pages=64), "max_running": 8, **options})


def answers(made: Rig) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    while made.engine.has_work:
        deltas = made.engine.step()
        made.take(deltas)
        for delta in deltas:
            record(found, delta)
    return found


def record(found: dict[str, Answer], delta: Delta) -> None:
    tokens, logprobs, logits = found.setdefault(delta.request_id, ([], [], []))
    tokens += delta.token_ids
    logprobs += delta.logprobs
    logits += [each.logit for each in delta.logits]


def served(*several: GenerateCall, **options: Any) -> tuple[dict[str, Answer], Rig]:
    made = rig(**options)
    for each in several:
        made.engine.add(each)
    return answers(made), made


EXPECTED = served(*calls(), depth=0)[0]


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("sizes", [SIZES, (3,)], ids=str)
def test_answers_are_those_from_the_host(mode: str, depth: int, sizes: tuple[int, ...]) -> None:
    found, made = served(*calls(), **DRAWS, logprob_sizes=sizes, mode=mode, depth=depth)
    assert found == EXPECTED
    ran = [name for name, _ in made.program.calls if name.startswith("logprobs")]
    assert bool(ran) == (depth > 0)
    assert made.all_pages_back()


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_steps_are_queued_ahead_as_without(kind: dict[str, Any]) -> None:
    plain = {name: value for name, value in kind.items() if name not in ("logprobs", "chosen_logits")}
    with_logprobs, without = (
        served(call("0", PROMPT, 12, seed=1, **params), **DRAWS, logprob_sizes=SIZES)[1].engine.stats()
        for params in (kind, plain)
    )
    assert with_logprobs.steps_ahead == without.steps_ahead > 0


def test_a_steady_decode_uploads_nothing() -> None:
    made = rig(**DRAWS, logprob_sizes=SIZES, config=fake_config(stride=32, pages=16))
    for name in "ab":
        made.engine.add(call(name, [ord(name) % VOCAB], 25, logprobs=1))
    while any(len(made.outputs.get(name, ())) < 4 for name in "ab"):
        made.step()
    uploads = made.device.uploads
    for _ in range(10):
        made.step()
    assert made.device.uploads == uploads


def test_more_best_tokens_than_candidates_are_read_by_the_host() -> None:
    asked = call("0", PROMPT, 6, logprobs=9)
    found, made = served(asked, **DRAWS, logprob_sizes=SIZES)
    assert found == served(asked, depth=0)[0]
    assert [len(each.top) for each in found["0"][1]] == [9] * 6
    assert not any(name.startswith("logprobs") for name, _ in made.program.calls)


def test_forced_tokens_get_the_terms_of_the_host() -> None:
    asked = call("0", PROMPT[:1], 5, logprobs=2, forced_token_ids=tuple(PROMPT[1:6]))
    found, _ = served(asked, **DRAWS, logprob_sizes=SIZES)
    assert found == served(asked, depth=0)[0]
    assert found["0"][0] == PROMPT[1:6]


def test_preempting_changes_nothing() -> None:
    made = rig(**DRAWS, logprob_sizes=(1, 8))
    for each in calls():
        made.engine.add(each)
    found: dict[str, Answer] = {}
    while made.engine.has_work:
        deltas = made.engine.step()
        made.take(deltas)
        for delta in deltas:
            record(found, delta)
            if len(found[delta.request_id][0]) == 4 and delta.request_id in "024":
                made.engine.preempt(delta.request_id)
    assert found == EXPECTED
    assert made.engine.stats().preemptions > 0


def test_a_row_of_nan_ends_its_request_alone() -> None:
    made = rig(**DRAWS, logprob_sizes=(1, 8))
    asked = [call(name, [ord(name) % VOCAB], 12, logprobs=1) for name in "ab"]
    expected, _ = served(asked[1], depth=0)
    for each in asked:
        made.engine.add(each)
    while any(len(made.outputs.get(name, ())) < 4 for name in "ab"):
        made.step()
    made.program.faults.spoil = lambda row: row == 0
    made.step()
    made.program.faults.spoil = lambda row: False
    made.run()
    assert made.reason("a") is FinishReason.ERROR
    assert made.outputs["b"] == expected["b"][0]
    assert made.all_pages_back()


def test_an_abort_in_flight_leaves_the_others_their_terms() -> None:
    made = rig(**DRAWS, logprob_sizes=(1, 8), depth=2)
    for each in calls():
        made.engine.add(each)
    while len(made.outputs.get("0", ())) < 4:
        made.step()
    assert made.program.in_flight
    delta = made.engine.abort("0")
    assert delta is not None
    made.take([delta])
    made.engine.add(call("late", PROMPT, 3, logprobs=0))  # gets the slot of the aborted request
    expected = EXPECTED | served(call("late", PROMPT, 3, logprobs=0), depth=0)[0]
    for name, rest in answers(made).items():
        num_tokens = len(rest[0])
        assert rest[0] == expected[name][0][-num_tokens:]
        assert rest[1] == expected[name][1][-num_tokens:]
        assert rest[2] == expected[name][2][-num_tokens:]
