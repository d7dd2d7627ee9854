from __future__ import annotations

from typing import Any

import orjson
import pytest

from shortfin_apps.llm.client.json_body import json_body


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        ("a\ud83d", "a\ufffd"),
        ({"\ud83d": ["\ude00", ("a\ude00", 1)]}, {"\ufffd": ["\ufffd", ["a\ufffd", 1]]}),
        ("\ud83d\ude00", "\U0001f600"),  # a pair in two characters
        ([1, None, "é"], [1, None, "é"]),
    ],
)
def test_lone_surrogates_are_replaced(value: Any, sent: Any) -> None:
    assert orjson.loads(json_body(value)) == sent


@pytest.mark.parametrize("value", [object(), ["\ud83d", object()]])
def test_what_json_cannot_express_is_an_error(value: object) -> None:
    with pytest.raises(TypeError):
        json_body(value)
