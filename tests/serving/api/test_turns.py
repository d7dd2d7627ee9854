"""The next turn of a chat begins with the tokens of the last one, as they were generated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall
from tests.serving.api.harness import CHAT, MESSAGES, Harness, events_of
from tests.serving.text.tiny_tokenizers import EOS, byte_level_tokenizer

TURNS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOKENIZER = byte_level_tokenizer(chat_template=TURNS)
LETTERS = [TOKENIZER.encode(letter)[0] for letter in "the"]  # which the tokenizer makes one token of
(EOS_ID,) = TOKENIZER.eos_token_ids
LENGTH, STOP, ABORT = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT


def harness_of(token_ids: list[int], reason: FinishReason = STOP) -> Harness:
    def script(call: GenerateCall) -> Iterator[Delta]:
        for position, token_id in enumerate(token_ids):
            ended = reason if position + 1 == len(token_ids) else None
            yield Delta(request_id=call.request_id, token_ids=(token_id,), finish_reason=ended)

    return Harness(script, tokenizer=TOKENIZER)


async def prompts_of_two_turns(harness: Harness, **fields: Any) -> list[tuple[int, ...]]:
    """The token ids that the engine is given, of a chat whose client sends the answer back as text."""
    first = await harness.post(CHAT, {"messages": MESSAGES, **fields})
    if fields.get("stream"):
        deltas = [event["choices"][0]["delta"] for event in events_of(first)]
        text = "".join(delta.get("content") or "" for delta in deltas)
    else:
        text = first.json()["choices"][0]["message"]["content"]
    answered = [*MESSAGES, {"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    assert (await harness.post(CHAT, {"messages": answered, **fields})).status_code == 200
    return [call.prompt_token_ids for call in harness.engine.calls]


REST = tuple(TOKENIZER.encode(f"{EOS}[user]more{EOS}[assistant]"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("ending", "reason"), [([EOS_ID], STOP), ([], LENGTH)])
async def test_the_next_turn_has_the_tokens_that_were_generated(
    stream: bool, ending: list[int], reason: FinishReason
) -> None:
    first, second = await prompts_of_two_turns(harness_of([*LETTERS, *ending], reason), stream=stream)
    assert second == (*first, *LETTERS, *REST)


async def test_a_turn_that_nobody_generated_is_tokenised() -> None:
    harness = harness_of([*LETTERS, EOS_ID])
    messages = [*MESSAGES, {"role": "assistant", "content": "the"}, {"role": "user", "content": "more"}]
    await harness.post(CHAT, {"messages": messages})
    (call,) = harness.engine.calls
    assert len(call.prompt_token_ids) == len(TOKENIZER.encode("[user]hi")) + 1 + len(
        TOKENIZER.encode("[assistant]the")
    ) + len(REST)


@pytest.mark.parametrize(
    ("token_ids", "reason", "fields"),
    [
        ([*LETTERS, *LETTERS, EOS_ID], STOP, {"stop": ["et"]}),  # its text ends within its tokens
        ([*LETTERS, EOS_ID], STOP, {"include_stop_str_in_output": True}),
        ([LETTERS[0], EOS_ID, *LETTERS[1:]], LENGTH, {}),  # its text leaves a token out
        ([*LETTERS], ABORT, {}),
    ],
)
async def test_other_answers_are_tokenised(
    token_ids: list[int], reason: FinishReason, fields: dict[str, Any]
) -> None:
    first, second = await prompts_of_two_turns(harness_of(token_ids, reason), **fields)
    assert second[len(first) :][: len(LETTERS)] != tuple(LETTERS)


async def test_callers_of_another_salt_get_no_tokens_of_others() -> None:
    harness = harness_of([*LETTERS, EOS_ID])
    first, own = await prompts_of_two_turns(harness, cache_salt="a")
    answered = [
        *MESSAGES,
        {"role": "assistant", "content": "the"},
        {"role": "user", "content": "more"},
    ]
    await harness.post(CHAT, {"messages": answered, "cache_salt": "b"})
    assert own == (*first, *LETTERS, *REST)
    assert harness.engine.calls[-1].prompt_token_ids != own


async def test_each_of_many_turns_continues_the_last() -> None:
    harness = harness_of([*LETTERS, EOS_ID])
    messages = list(MESSAGES)
    for _ in range(3):
        answer = (await harness.post(CHAT, {"messages": messages})).json()["choices"][0]["message"]
        messages += [answer, {"role": "user", "content": "x"}]
    prompts = [call.prompt_token_ids for call in harness.engine.calls]
    for before, after in pairwise(prompts):
        assert after[: len(before) + len(LETTERS)] == (*before, *LETTERS)
