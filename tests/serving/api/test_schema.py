from __future__ import annotations

import pytest
from pydantic import ValidationError

from shortfin_apps.llm.serving.api.admin import LogLevelBody
from shortfin_apps.llm.serving.api.schema import MAX_ABORTED, Body, ToolCall
from tests.serving.api.harness import CHAT, COMPLETIONS, TOKENIZER, Harness, bodies


@pytest.mark.parametrize(
    ("prompt", "prompt_token_ids"),
    [
        ("a", [TOKENIZER.encode("a")]),
        (["a", "b"], [TOKENIZER.encode("a"), TOKENIZER.encode("b")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_every_type_of_prompt(
    harness: Harness, prompt: object, prompt_token_ids: list[list[int]]
) -> None:
    response = await harness.post(COMPLETIONS, {"prompt": prompt, "n": 2})
    assert [c["index"] for c in response.json()["choices"]] == list(range(2 * len(prompt_token_ids)))
    assert [list(c.prompt_token_ids) for c in harness.engine.calls] == [
        p for p in prompt_token_ids for _ in range(2)
    ]
    assert response.json()["usage"]["prompt_tokens"] == sum(map(len, prompt_token_ids))


@pytest.mark.parametrize("named", [{}, {"id": "call_1"}])
def test_a_template_sees_the_id_of_a_call_that_has_one(named: dict[str, str]) -> None:
    call = ToolCall.model_validate({**named, "function": {"name": "f", "arguments": '{"a": 1}'}})
    function = {"name": "f", "arguments": {"a": 1}}
    assert call.for_template() == {**named, "type": "function", "function": function}


async def test_text_parts_are_joined(harness: Harness) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await harness.post(CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert "[user]a\nb\n" in TOKENIZER.decode(harness.engine.calls[0].prompt_token_ids)


async def test_parts_of_answers_are_texts(harness: Harness) -> None:
    parts = [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    messages = [{"role": "assistant", "content": parts}, {"role": "assistant", "refusal": "c"}]
    assert (await harness.post(CHAT, {"messages": messages})).status_code == 200
    assert "[assistant]a\nb\n[assistant]c\n" in TOKENIZER.decode(harness.engine.calls[0].prompt_token_ids)


async def test_non_text_parts_are_refused(harness: Harness) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    response = await harness.post(CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages.content")


@pytest.mark.parametrize("body", bodies())
def test_each_field_is_in_one_table(body: type[Body]) -> None:
    assert not body.model_fields.keys() & body.REFUSED.keys()
    assert not body.model_fields.keys() & body.INERT
    assert not body.REFUSED.keys() & body.INERT


def num_errors(body: type[Body], value: dict[str, object]) -> int:
    try:
        body.model_validate(value)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("body", [*bodies(), LogLevelBody])
@pytest.mark.parametrize("wrong", [[object()] * 1_000, dict.fromkeys(map(str, range(1_000)), object())])
def test_the_first_of_many_wrong_entries_refuses_a_field(body: type[Body], wrong: object) -> None:
    """Pydantic lists all errors otherwise, which takes 18 s for a body of a million wrong entries."""
    for name, field in body.model_fields.items():
        assert num_errors(body, {field.alias or name: wrong}) < 20, name


async def test_the_number_of_aborted_ids_is_limited(harness: Harness) -> None:
    allowed = await harness.post("/abort", {"rid": ["x"] * MAX_ABORTED})
    assert allowed.json() == {"aborted": 0}
    refused = await harness.post("/abort", {"rid": ["x"] * (MAX_ABORTED + 1)})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "rid")
