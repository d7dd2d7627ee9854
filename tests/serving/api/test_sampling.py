from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.errors import ArtifactError, InvalidRequestError
from shortfin_apps.llm.serving.api.sampling import SamplingDefaults, params_named, unapplied_fields, with_seed
from tests.serving.api.harness import CHAT, COMPLETIONS, MESSAGES, MESSAGES_ROUTE, NATIVE, RESPONSES, Harness


@pytest.mark.parametrize(
    ("generation", "override", "temperature"),
    [
        ({}, None, 0.25),
        ({"temperature": 0.6}, None, 0.6),
        ({"temperature": 0.6, "do_sample": False}, None, 0.0),
        ({"temperature": 0.6}, 0.9, 0.9),
        ({}, 0.0, 0.0),
    ],
)
def test_the_default_temperature(
    generation: dict[str, Any], override: float | None, temperature: float
) -> None:
    defaults = SamplingDefaults.of_model(generation, otherwise=0.25, override=override)
    assert defaults.values["temperature"] == temperature


def test_the_models_other_defaults_are_used() -> None:
    defaults = SamplingDefaults.of_model({"top_k": 20, "top_p": 0.8}, otherwise=1.0, override=None)
    assert [defaults.values[name] for name in ("top_k", "top_p", "min_p")] == [20, 0.8, 0.0]


PUBLISHED: dict[str, Any] = {
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "typical_p": 0.8,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_sampling_field_of_the_model_is_a_default(name: str) -> None:
    defaults = SamplingDefaults.of_model({name: PUBLISHED[name]}, otherwise=1.0, override=None)
    assert defaults.differences() == {name: PUBLISHED[name]}


def test_numbers_in_other_forms_are_read() -> None:
    defaults = SamplingDefaults.of_model({"top_k": 40.0, "top_p": 1}, otherwise=1.0, override=None)
    assert isinstance(defaults.values["top_k"], int)
    assert defaults.values["top_k"] == 40
    assert SamplingDefaults.of_model({"top_k": -1}, otherwise=1.0, override=None).values["top_k"] == 0


def test_the_models_longest_answer_is_the_default_of_chats() -> None:
    defaults = SamplingDefaults.of_model({"max_new_tokens": 7}, otherwise=1.0, override=None)
    assert defaults.max_tokens == 7
    with pytest.raises(ArtifactError, match="must be at least 1"):
        SamplingDefaults.of_model({"max_new_tokens": 0}, otherwise=1.0, override=None)


def test_sampling_that_is_not_applied_is_named() -> None:
    off = {"mirostat": 0, "num_beams": 1, "suppress_tokens": [], "penalty_last_n": -1, "cache": "dynamic"}
    assert unapplied_fields(off) == []
    asked = {"mirostat": 2, "no_repeat_ngram_size": 3, "suppress_tokens": [1], "bad_words_ids": None}
    assert sorted(unapplied_fields(asked)) == ["mirostat", "no_repeat_ngram_size", "suppress_tokens"]


JSON_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([1])


@given(
    st.dictionaries(st.sampled_from([*PUBLISHED, "temperature", "do_sample", "max_new_tokens"]), JSON_VALUES)
)
def test_any_generation_config_is_used_or_refused(generation: dict[str, Any]) -> None:
    try:
        defaults = SamplingDefaults.of_model(generation, otherwise=1.0, override=None)
    except ArtifactError:
        return
    SamplingParams(max_tokens=1, **defaults.values)


@pytest.mark.parametrize(
    "generation",
    [{"top_p": 7}, {"temperature": "hot"}, {"top_k": [1]}, {"top_k": 10**30}, {"max_new_tokens": 10**30}],
)
def test_invalid_generation_configs_are_reported(generation: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="generation_config"):
        SamplingDefaults.of_model(generation, otherwise=1.0, override=None)


def test_errors_name_the_field_as_the_caller_did() -> None:
    with pytest.raises(InvalidRequestError) as caught, params_named({"max_tokens": "max_new_tokens"}):
        raise InvalidRequestError("`max_tokens` is bad", "max_tokens", {"k": 1})
    assert (str(caught.value), caught.value.param) == ("`max_new_tokens` is bad", "max_new_tokens")
    assert caught.value.extra == {"k": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "n": 2, "seed": -1}),
        (CHAT, {"messages": MESSAGES, "seed": -1}),
        (RESPONSES, {"input": "a", "seed": -1}),
        (MESSAGES_ROUTE, {"messages": MESSAGES, "max_tokens": 9, "seed": -1}),
        (NATIVE, {"text": "a", "sampling_params": {"seed": -1}}),
        (NATIVE, {"text": "a", "sampling_params": {"sampling_seed": -1, "n": 2}}),
    ],
)
async def test_a_seed_of_minus_one_is_none(harness: Harness, path: str, body: Any) -> None:
    """As in vLLM and llama.cpp."""
    response = await harness.post(path, body)
    assert response.status_code == 200, response.text
    assert {call.params.seed for call in harness.engine.calls} == {None}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ["a", "b"], "stop_token_ids": [5], "allowed_token_ids": [5, 6, 5]}),
        (
            NATIVE,
            {"text": ["a", "b"], "sampling_params": {"stop_token_ids": [5], "allowed_token_ids": [5, 6, 5]}},
        ),
    ],
)
async def test_the_prompts_of_a_batch_share_the_ids_that_a_body_names(
    path: str, body: dict[str, Any]
) -> None:
    harness = Harness()
    response = await harness.post(path, body)
    assert response.status_code == 200
    first, second = (call.params for call in harness.engine.calls)
    assert (first.stop_token_ids, first.allowed_token_ids) == (frozenset({5}), frozenset({5, 6}))
    assert first.stop_token_ids is second.stop_token_ids
    assert first.allowed_token_ids is second.allowed_token_ids


def test_the_first_choice_keeps_the_seed() -> None:
    params = SamplingParams(max_tokens=1, seed=2**63 - 1)
    assert with_seed(params, 0) == params
    assert with_seed(params, 1).seed == 0
    assert with_seed(SamplingParams(max_tokens=1), 1).seed is None
