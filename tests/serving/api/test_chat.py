from __future__ import annotations

import pytest

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.contract.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LlmError,
    RequestAbortedError,
)
from shortfin_apps.llm.serving.api.chat import chat_body, end_of
from shortfin_apps.llm.serving.api.responses.schema import ResponsesBody
from shortfin_apps.llm.serving.api.schema import SamplingFields, ServingFields
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta

MESSAGES = [{"role": "user", "content": "hi"}]


def test_every_sampling_and_serving_field_is_the_chats() -> None:
    fields = {"temperature": 0.5, "top_k": 3, "stop": ["a"], "regex": "a+", "priority": 2, "timeout_s": 1.5}
    body = ResponsesBody.model_validate({"input": "hi", **fields})
    chat = chat_body(body, messages=MESSAGES)
    for name in (*SamplingFields.model_fields, *ServingFields.model_fields):
        assert getattr(chat, name) == getattr(body, name)


def test_several_choices_are_refused() -> None:
    assert chat_body(ResponsesBody(input="hi", n=1), messages=MESSAGES).n == 1
    with pytest.raises(InvalidRequestError, match="`n` must be 1"):
        chat_body(ResponsesBody(input="hi", n=2), messages=MESSAGES)


@pytest.mark.parametrize("cause", [None, DeadlineExceededError("too late")])
def test_an_aborted_answer_is_an_error(cause: LlmError | None) -> None:
    with pytest.raises(RequestAbortedError, match="too late" if cause else "aborted"):
        end_of(TextDelta("a", (1,), finish_reason=FinishReason.ABORT, error=cause))
    assert end_of(TextDelta("a", (1,), finish_reason=FinishReason.STOP)) is FinishReason.STOP
