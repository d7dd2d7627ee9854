"""Requests with penalties, biases, bans and grammars get the same tokens wherever their rows are adjusted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shortfin_apps.llm.components.request.messages import FinishReason, GenerateCall
from shortfin_apps.llm.contract.errors import ConstraintError
from tests.components.engine.test_row_draws import invoked, outputs, record_downloads, rig
from tests.components.engine_fixture import PROMPT, Rig, call
from tests.components.fake_device import VOCAB


class Parity:
    """A grammar of even and odd tokens in turns, which keeps what it allows last, as compiled ones do.

    `computed` has for each time that it computes that, how many invocations are in flight.
    """

    param = "grammar"

    def __init__(self, made: Rig, fails_after: int = 100) -> None:
        self._made, self._fails_after = made, fails_after
        self._known: int | None = None
        self.computed: list[int] = []

    def matcher(self) -> Parity:
        return self

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
        if len(generated) >= self._fails_after:
            raise ConstraintError("the grammar is too complex")
        if self._known != len(generated):
            self._known = len(generated)
            self.computed.append(len(self._made.program.in_flight))
        return (b"\xaa" if len(generated) % 2 else b"\x55") * (VOCAB // 8)

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        return ()


KINDS: list[dict[str, Any]] = [
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.3, "top_p": 0.7},
    {"repetition_penalty": 1.3, "min_p": 0.05},
    {"logit_bias": ((3, 5.0), (9, -4.0)), "temperature": 0.0},
    {"repetition_penalty": 0.8, "top_k": 3},
    {"allowed_token_ids": frozenset(range(5, 30))},
    {"bad_words": ((4,), (3, 8)), "min_tokens": 4, "presence_penalty": -0.5},
    {"temperature": 1.5},
]
SIZES: dict[str, Any] = {"sample_sizes": (2, 8), "adjusted_sample_sizes": (2, 4)}


def calls(**params: Any) -> list[GenerateCall]:
    kinds = [{"temperature": 1.0, **kind, **params} for kind in KINDS]
    return [call(str(i), PROMPT[i % 3 :], 9, seed=i, **kind) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
def test_tokens_are_those_of_the_host(mode: str) -> None:
    expected = outputs(rig(mode=mode), calls())
    made = rig(mode=mode, **SIZES)
    sizes = record_downloads(made)
    assert outputs(made, calls()) == expected
    assert invoked(made, "adjusted_sample") > 0
    assert invoked(made, "sample") > 0
    assert VOCAB not in sizes, "logits were downloaded"


def test_a_program_without_such_entries_sends_logits_to_the_host() -> None:
    made = rig(sample_sizes=(8,))
    sizes = record_downloads(made)
    assert outputs(made, calls()) == outputs(rig(), calls())
    assert VOCAB in sizes


def test_requests_that_need_logits_get_them_beside_those_that_do_not() -> None:
    scored = call("logprobs", PROMPT, 3, temperature=1.0, presence_penalty=1.0, seed=9, logprobs=2)
    several = [*calls(), scored]
    assert outputs(rig(**SIZES), several) == outputs(rig(), several)


def test_candidates_that_decide_a_token_need_no_adjusted_row() -> None:
    made = rig(**SIZES)
    made.engine.add(call("0", PROMPT, 5, temperature=0.0, presence_penalty=1e-6))
    made.run()
    assert invoked(made, "adjusted_sample") == 0


def test_a_spoiled_row_fails_its_request_alone() -> None:
    made = rig(**SIZES)
    made.program.faults.spoil = lambda row: row == 0
    made.engine.add(calls()[0])
    made.run()
    assert made.reason("0") is FinishReason.ERROR
    assert made.all_pages_back()


@pytest.mark.parametrize("sizes", [{}, SIZES], ids=["host", "device"])
def test_a_row_without_a_token_left_is_told_from_a_spoiled_one(sizes: dict[str, Any]) -> None:
    made = rig(**sizes)
    every_token = tuple((token_id,) for token_id in range(VOCAB))
    made.engine.add(call("0", PROMPT, 5, temperature=1.0, bad_words=every_token))
    made.run()
    assert made.reason("0") is FinishReason.ERROR
    assert isinstance(made.last["0"].error, ConstraintError)
    assert "bans allow" in str(made.last["0"].error)


@pytest.mark.parametrize("sizes", [{}, SIZES], ids=["host", "device"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_grammars_are_asked_while_the_device_runs(sizes: dict[str, Any], temperature: float) -> None:
    made = rig(**sizes)
    grammar = Parity(made)
    made.engine.add(call("0", PROMPT, 6, temperature=temperature, seed=3, output_grammar=grammar))
    made.run()
    assert [token_id % 2 for token_id in made.outputs["0"]] == [0, 1, 0, 1, 0, 1]
    assert grammar.computed == [1] * 6
    assert (invoked(made, "adjusted_sample") > 0) is (bool(sizes) and temperature > 0)


@pytest.mark.parametrize("sizes", [{}, SIZES], ids=["host", "device"])
def test_a_grammar_that_fails_ends_its_request_alone(sizes: dict[str, Any]) -> None:
    made = rig(**sizes)
    grammar = Parity(made, fails_after=2)
    made.engine.add(call("0", PROMPT, 6, temperature=1.0, output_grammar=grammar))
    made.engine.add(call("1", PROMPT, 6, temperature=1.0, presence_penalty=1.0))
    made.run()
    assert isinstance(made.last["0"].error, ConstraintError)
    assert len(made.outputs["1"]) == 6
    assert made.all_pages_back()
