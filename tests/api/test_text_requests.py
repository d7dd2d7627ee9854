from __future__ import annotations

import pytest

from shortfin_apps.llm.api.schema import CompletionBody
from shortfin_apps.llm.api.text_requests import check_limits, is_empty
from shortfin_apps.llm.errors import InvalidRequestError
from tests.api.harness import Harness


@pytest.mark.parametrize("fields", [{"n": 0}, {"stop": [""]}, {"bad_words": [""]}, {"prompt_logprobs": -1}])
def test_what_is_over_a_limit_is_named(fields: dict[str, object]) -> None:
    body = CompletionBody.model_validate({"prompt": "a", **fields})
    with pytest.raises(InvalidRequestError, match=f"`{next(iter(fields))}`"):
        check_limits(Harness().service, body)


def test_a_completion_of_no_tokens_is_empty() -> None:
    assert is_empty(CompletionBody(prompt="a", max_tokens=0))
    assert not is_empty(CompletionBody(prompt="a", max_tokens=1))
