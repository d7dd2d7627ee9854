from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.components.request.request import Chooser, Request
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.components.sampling.sampler import (
    MAX_FORCED_TOKENS,
    Sampler,
)
from shortfin_apps.llm.contract.abi import NO_TOP_K, SamplingField
from shortfin_apps.llm.contract.errors import InvalidRequestError, InvocationError
from tests.components.engine_fixture import call
from tests.components.sampling.grammars import Forcing
from tests.components.sampling.rows import LOGITS, SAMPLER, row


def test_greedy_takes_the_best_and_the_lower_id_of_equals() -> None:
    request = Request(call("a", [1]))
    assert SAMPLER.sample(row(), request) == 1
    equal = np.array([1.0, 2.0, 2.0], np.float32)
    assert SAMPLER.sample(row(equal), request) == 1
    assert SAMPLER.sample(row(equal, full=True), request) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    spoiled = np.full(6, bad, np.float32)
    with pytest.raises(InvocationError, match="finite"):
        SAMPLER.sample(row(spoiled), Request(call("a", [1])))


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_one_nan_is_an_error_though_it_is_not_among_the_candidates(
    params: dict[str, Any],
) -> None:
    spoiled = LOGITS.copy()
    spoiled[2] = np.nan
    best = np.argsort(-LOGITS, kind="stable")[:3]
    for candidates in (
        Candidates(LOGITS[best], best, spoiled),
        Candidates(np.empty(0), np.empty(0, np.int64), spoiled),
    ):
        assert np.isnan(candidates.best)
        with pytest.raises(InvocationError, match="finite"):
            SAMPLER.sample(candidates, Request(call("a", [1], **params)))


@pytest.mark.parametrize(
    ("params", "banned", "needed"),
    [
        ({"temperature": 0}, 0, False),
        ({"temperature": 0}, 3, False),
        ({"temperature": 0}, 4, True),
        ({"temperature": 1, "top_k": 4}, 0, False),
        ({"temperature": 1, "top_k": 4}, 1, True),
        ({"temperature": 1, "top_k": 4, "top_p": 0.5}, 0, False),
        ({"temperature": 1, "top_p": 0.5}, 0, True),
        ({"temperature": 1, "top_k": 5}, 0, True),
        ({"temperature": 0, "logprobs": 0}, 0, True),
        ({"temperature": 0, "presence_penalty": 0.1}, 0, True),
        ({"temperature": 0, "logit_bias": ((1, 1.0),)}, 0, True),
        ({"temperature": 0, "allowed_token_ids": frozenset({1})}, 0, True),
        ({"temperature": 0, "bad_words": ((1,), (2,), (3, 2))}, 1, False),
        ({"temperature": 0, "bad_words": ((1,), (2,), (3,))}, 1, True),
        ({"temperature": 1, "top_k": 4, "typical_p": 0.5}, 0, False),
        ({"temperature": 1, "typical_p": 0.5}, 0, True),
    ],
)
def test_logits_are_needed_only_when_the_candidates_do_not_decide(
    params: dict[str, Any], banned: int, needed: bool
) -> None:
    stop = frozenset(range(banned))
    request = Request(call("a", [1], min_tokens=1, stop_token_ids=stop, **params))
    assert Sampler(frozenset(), num_candidates=4).needs_logits(request) is needed
    assert not Sampler(frozenset(), num_candidates=4, returns_logits=False).needs_logits(request)


@pytest.mark.parametrize(
    ("params", "num_generated", "suits"),
    [
        ({"temperature": 0}, 0, True),
        ({"temperature": 1, "top_k": 4, "top_p": 0.5, "min_p": 0.1}, 0, True),
        ({"temperature": 1, "top_k": 5}, 0, False),
        ({"temperature": 1}, 0, False),
        ({"temperature": 0, "logprobs": 0}, 0, False),
        ({"temperature": 0, "chosen_logits": True}, 0, False),
        ({"temperature": 0, "repetition_penalty": 1.1}, 0, False),
        ({"temperature": 0, "bad_words": ((3,),)}, 0, False),
        ({"temperature": 1, "top_k": 4, "typical_p": 0.5}, 0, False),
        ({"temperature": 0, "min_tokens": 2, "stop_token_ids": frozenset({3})}, 1, False),
        ({"temperature": 0, "min_tokens": 2, "stop_token_ids": frozenset({3})}, 2, True),
    ],
)
def test_a_device_samples_what_the_candidates_decide_from_now_on(
    params: dict[str, Any], num_generated: int, suits: bool
) -> None:
    request = Request(call("a", [1], **params))
    request.token_ids += [0] * num_generated
    sampler = Sampler(frozenset(), num_candidates=4)
    assert (sampler.chooser(request) is Chooser.DEVICE) is suits
    assert Sampler(frozenset(), num_candidates=0).chooser(request) is Chooser.HOST


@pytest.mark.parametrize(
    ("params", "chooser"),
    [
        ({"temperature": 0, "logprobs": 4}, Chooser.DEVICE),
        ({"temperature": 1, "logprobs": 0}, Chooser.DEVICE),
        ({"temperature": 0, "chosen_logits": True}, Chooser.DEVICE),
        ({"temperature": 0, "logprobs": 5}, Chooser.HOST),
        ({"temperature": 1, "logprobs": 0, "typical_p": 0.5}, Chooser.HOST),
        ({"temperature": 1, "logprobs": 0, "top_k": 5}, Chooser.HOST),
        ({"temperature": 0, "logprobs": 0, "presence_penalty": 0.1}, Chooser.ADJUSTED),
        ({"temperature": 1, "chosen_logits": True, "logit_bias": ((1, 1.0),)}, Chooser.ADJUSTED),
    ],
)
def test_a_device_that_computes_logprobs_chooses_as_without_them(
    params: dict[str, Any], chooser: Chooser
) -> None:
    """As many best tokens can be reported as there are candidates."""
    request = Request(call("a", [1], **params))
    draws: dict[str, Any] = {"num_candidates": 4, "draws_rows": True, "adjusts_rows": True}
    assert Sampler(frozenset(), **draws, computes_logprobs=True).chooser(request) is chooser
    assert Sampler(frozenset(), **draws).chooser(request) is Chooser.HOST


class NoGrammar:
    """A grammar that needs no text."""

    param = "grammar"

    def matcher(self) -> None:
        return None


@pytest.mark.parametrize(
    ("params", "num_ahead", "chooser"),
    [
        ({"presence_penalty": 0.1}, 3, Chooser.ADJUSTED),
        ({"presence_penalty": 0.1, "top_k": 5}, 0, Chooser.HOST),
        ({"presence_penalty": 0.1, "typical_p": 0.5}, 0, Chooser.HOST),
        ({"allowed_token_ids": frozenset({3, 4}), "bad_words": ((3,),)}, 1, Chooser.ADJUSTED),
        ({"bad_words": ((3,), (4, 5))}, 0, Chooser.LATE),
        ({"output_grammar": NoGrammar(), "presence_penalty": 0.1}, 0, Chooser.LATE),
        ({"min_tokens": 3, "stop_token_ids": frozenset({3})}, 2, Chooser.ADJUSTED),
        ({"min_tokens": 3, "stop_token_ids": frozenset({3})}, 3, Chooser.DEVICE),
        (
            {"min_tokens": 3, "stop_token_ids": frozenset({3}), "allowed_token_ids": frozenset({4})},
            2,
            Chooser.HOST,
        ),
    ],
)
def test_rows_wait_for_the_token_before_only_if_their_edits_depend_on_it(
    params: dict[str, Any], num_ahead: int, chooser: Chooser
) -> None:
    request = Request(call("a", [1], **{"temperature": 1, **params}))
    sampler = Sampler(frozenset(), num_candidates=4, draws_rows=True, adjusts_rows=True)
    assert sampler.chooser(request, num_ahead) is chooser


@pytest.mark.parametrize(
    ("params", "drawn"),
    [
        ({"temperature": 1}, True),
        ({"temperature": 1, "top_p": 0.5, "min_p": 0.1}, True),
        ({"temperature": 0}, False),
        ({"temperature": 1, "top_k": 1}, False),
        ({"temperature": 1, "top_k": 4}, False),
        ({"temperature": 1, "top_k": 5}, False),
        ({"temperature": 1, "logprobs": 0}, False),
        ({"temperature": 1, "frequency_penalty": 0.1}, False),
        ({"temperature": 1, "typical_p": 0.5}, False),
        ({"temperature": 1, "min_tokens": 2, "stop_token_ids": frozenset({3})}, False),
    ],
)
def test_a_device_that_can_draws_from_whole_rows(params: dict[str, Any], drawn: bool) -> None:
    """Then nobody needs the logits on the host, and a loop can go on with them."""
    request = Request(call("a", [1], **params))
    sampler = Sampler(frozenset(), num_candidates=4, draws_rows=True)
    without = Sampler(frozenset(), num_candidates=4)
    assert sampler.is_drawn_from_row(request) is drawn
    assert sampler.needs_logits(request) is (without.needs_logits(request) and not drawn)
    assert (sampler.chooser(request) is Chooser.DEVICE) is (
        without.chooser(request) is Chooser.DEVICE or drawn
    )
    assert (sampler.device_fields(request)[SamplingField.TOP_K] == NO_TOP_K) is (
        drawn or not {"min_tokens", "logprobs", "frequency_penalty", "typical_p"}.isdisjoint(params)
    )
    assert not without.is_drawn_from_row(request)


@pytest.mark.parametrize(
    ("params", "refused"),
    [
        ({"temperature": 1.0, "top_p": 0.5, "min_tokens": 1}, None),
        ({"logprobs": 0}, "logprobs"),
        ({"min_tokens": 1, "stop_token_ids": frozenset({3, 4})}, None),
        ({"min_tokens": 1, "stop_token_ids": frozenset({3, 4, 5})}, "min_tokens"),
        ({"stop_token_ids": frozenset({3, 4, 5})}, None),
        ({"min_tokens": 1, "bad_words": ((3,), (4,), (5,))}, "min_tokens"),
        ({"bad_words": ((3,), (4,), (5,))}, None),
        ({"frequency_penalty": 1}, "frequency_penalty"),
    ],
)
def test_what_cannot_be_done_without_logits_is_refused(params: dict[str, Any], refused: str | None) -> None:
    wanted = call("a", [1], **params).params
    Sampler(frozenset({1}), num_candidates=4).check(wanted)
    without_logits = Sampler(frozenset({1}), num_candidates=4, returns_logits=False)
    if refused is None:
        without_logits.check(wanted)
        return
    with pytest.raises(InvalidRequestError, match=f"without logits, so no `{refused}`") as raised:
        without_logits.check(wanted)
    assert raised.value.param == refused


@pytest.mark.parametrize(
    ("params", "is_forced"),
    [
        ({}, True),
        ({"temperature": 2.0, "top_p": 0.1, "top_k": 3, "seed": 4}, True),
        ({"repetition_penalty": 1.5, "frequency_penalty": 2.0, "presence_penalty": 2.0}, True),
        ({"logit_bias": ((5, -100.0), (1, 100.0))}, True),
        ({"stop_token_ids": frozenset({5})}, True),
        ({"logprobs": 0}, False),
        ({"chosen_logits": True}, False),
        ({"bad_words": ((1, 5),)}, False),
        ({"allowed_token_ids": frozenset({5})}, False),
        ({"forced_token_ids": (2, 3)}, False),
        ({"forced_token_ids": (2,)}, True),
        ({"output_grammar": None}, False),
    ],
)
def test_forced_tokens_are_known_where_nothing_else_bans_them_or_needs_their_rows(
    params: dict[str, Any], is_forced: bool
) -> None:
    """Then they are what any row yields."""
    grammar = Forcing(5, 2, 5, 4, *[1] * MAX_FORCED_TOKENS)
    request = Request(call("a", [1], **{"output_grammar": grammar, **params}))
    request.token_ids.append(0)
    forced = list(SAMPLER.forced(request))
    if not is_forced:
        assert not forced
        return
    assert forced == [5, 2, 5, 4, *[1] * (MAX_FORCED_TOKENS - 4)]
    for token_id in forced[:6]:
        assert SAMPLER.sample(row(), request) == token_id
        request.token_ids.append(token_id)


def test_below_the_normal_numbers_of_f32_the_best_candidate_decides() -> None:
    request = Request(call("a", [1], temperature=1e-46))
    assert not Sampler(frozenset(), num_candidates=1).needs_logits(request)
