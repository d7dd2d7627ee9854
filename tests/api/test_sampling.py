from __future__ import annotations

from typing import Any

import pytest

from shortfin_apps.llm.api.sampling import SamplingDefaults, params_named
from shortfin_apps.llm.errors import ArtifactError, InvalidRequestError


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
    assert defaults.temperature == temperature


def test_the_models_other_defaults_are_used() -> None:
    defaults = SamplingDefaults.of_model({"top_k": 20, "top_p": 0.8}, otherwise=1.0, override=None)
    assert (defaults.top_k, defaults.top_p, defaults.min_p) == (20, 0.8, 0.0)


@pytest.mark.parametrize("generation", [{"top_p": 7}, {"temperature": "hot"}, {"top_k": [1]}])
def test_invalid_generation_configs_are_reported(generation: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="generation_config"):
        SamplingDefaults.of_model(generation, otherwise=1.0, override=None)


def test_errors_name_the_field_as_the_caller_did() -> None:
    with pytest.raises(InvalidRequestError) as caught, params_named({"max_tokens": "max_new_tokens"}):
        raise InvalidRequestError("`max_tokens` is bad", "max_tokens", {"k": 1})
    assert (str(caught.value), caught.value.param) == ("`max_new_tokens` is bad", "max_new_tokens")
    assert caught.value.extra == {"k": 1}
