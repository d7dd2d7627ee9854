from __future__ import annotations

import pytest

from shortfin_apps.llm.contract.errors import InvalidRequestError
from tests.components.engine_fixture import call, make_rig
from tests.components.fake_device import fake_config


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "match"),
    [([], 1, "empty"), ([1] * 60, 5, "context of 64"), ([1] * 30, 10, "--pages")],
)
def test_a_request_that_can_never_fit_is_refused(prompt: list[int], max_tokens: int, match: str) -> None:
    rig = make_rig(fake_config(pages=8))
    with pytest.raises(InvalidRequestError, match=match):
        rig.engine.check(call("a", prompt, max_tokens=max_tokens))
