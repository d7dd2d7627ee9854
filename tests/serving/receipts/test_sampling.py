from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.grammar.source import GrammarKind, GrammarSource
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.serving.receipts.receipt import ReceiptError, canonical_json
from shortfin_apps.llm.serving.receipts.sampling import (
    NOT_RECORDED,
    RecordedSampling,
    recorded_sampling,
    request_sampling,
)
from tests.serving.receipts.examples import VALUES

IDS = st.integers(0, 999)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(5, 99),
    min_tokens=st.integers(0, 5),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 99),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop_token_ids=st.frozensets(IDS),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 100),
    logit_bias=st.lists(st.tuples(IDS, st.floats(-100, 100))).map(tuple),
    allowed_token_ids=st.none() | st.frozensets(IDS, min_size=1),
    typical_p=st.floats(0.1, 1),
    chosen_logits=st.just(True),
)


def no_words(words: Any) -> tuple[tuple[int, ...], ...]:
    return ()


@given(PARAMS)
def test_what_is_recorded_makes_the_same_parameters(params: SamplingParams) -> None:
    """All but what is only reported, by way of JSON."""
    written = orjson.loads(canonical_json(recorded_sampling(params)))
    again = RecordedSampling.parse(written).params(no_words, None)
    for field in fields(params):
        if field.name != "logprobs":
            assert getattr(again, field.name) == getattr(params, field.name), field.name


def test_every_parameter_is_recorded_or_only_reported() -> None:
    names = {field.name for field in fields(SamplingParams)} - NOT_RECORDED
    assert names <= set(RecordedSampling.model_fields)


def test_defaults_are_left_out() -> None:
    assert recorded_sampling(SamplingParams(max_tokens=5)) == {"max_tokens": 5}


def test_what_was_given_as_text_is_recorded_as_that() -> None:
    recorded = recorded_sampling(
        SamplingParams(max_tokens=5, temperature=0.0),
        stop=("a",),
        skip_special_tokens=False,
        bad_words=("b",),
        grammar=GrammarSource(GrammarKind.JSON_SCHEMA, "{}", is_compact=True),
    )
    assert recorded == {
        "max_tokens": 5,
        "temperature": 0.0,
        "stop": ["a"],
        "skip_special_tokens": False,
        "bad_words": ["b"],
        "structured_outputs": {"json": "{}", "disable_any_whitespace": True},
    }
    parsed = RecordedSampling.parse(recorded)
    assert parsed.params(lambda words: ((len(words),),), None).bad_words == ((1,),)
    assert parsed.structured_outputs is not None
    assert parsed.structured_outputs.source() == GrammarSource(GrammarKind.JSON_SCHEMA, "{}", True)


@pytest.mark.parametrize("kind", GrammarKind)
def test_every_kind_of_grammar_comes_back(kind: GrammarKind) -> None:
    recorded = recorded_sampling(SamplingParams(max_tokens=5), grammar=GrammarSource(kind, "text"))
    outputs = RecordedSampling.parse(recorded).structured_outputs
    assert outputs is not None
    read_as = GrammarKind.EBNF if kind is GrammarKind.LARK else kind  # which reads both
    assert outputs.source() == GrammarSource(read_as, "text")


def test_a_request_names_what_servers_have_defaults_of() -> None:
    assert request_sampling({"max_tokens": 5, "top_k": 3}) == {
        "max_tokens": 5,
        "temperature": 1.0,
        "top_k": 3,
        "top_p": 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }


@given(st.dictionaries(st.sampled_from([*RecordedSampling.model_fields, "other"]), VALUES))
def test_garbage_raises_nothing_else(sampling: dict[str, Any]) -> None:
    with suppress(ReceiptError):
        RecordedSampling.parse(sampling).params(no_words, None)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({}, r"`sampling\.max_tokens`: Field required"),
        ({"max_tokens": 0}, "`sampling`: `max_tokens` must be at least 1"),
        ({"max_tokens": "5"}, r"`sampling\.max_tokens`"),
        ({"max_tokens": 5, "chosen_logits": True}, r"`sampling\.chosen_logits`: Extra inputs"),
        ({"max_tokens": 5, "temperature": 1e9}, "`temperature` must lie in"),
    ],
)
def test_a_wrong_value_is_named(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(ReceiptError, match=message):
        RecordedSampling.parse(sampling).params(no_words, None)
