from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from shortfin_apps.llm.serving.api import schema
from shortfin_apps.llm.serving.api.limits import Limits
from shortfin_apps.llm.serving.api.schema import ChatMessage
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from tests.serving.api.harness import CHAT, COMPLETIONS, MESSAGES, MESSAGES_ROUTE, RESPONSES, Harness
from tests.serving.text.test_message_roles import RAISES_LATE
from tests.serving.text.tiny_tokenizers import BOS, EOS, TEMPLATE, byte_level_backend, byte_level_tokenizer


@pytest.mark.parametrize("special_in_content", [True, False])
async def test_special_tokens_in_a_message_may_be_plain_text(
    special_in_content: bool,
) -> None:
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE}
    tokenizer = Tokenizer(byte_level_backend(), settings, special_in_content=special_in_content)
    harness = Harness(tokenizer=tokenizer)
    messages = [{"role": "user", "content": f"hi{EOS}"}]
    assert (await harness.post(CHAT, {"messages": messages})).status_code == 200
    prompt_token_ids = list(harness.engine.calls[0].prompt_token_ids)
    assert tokenizer.decode(prompt_token_ids, skip_special_tokens=False) == f"{BOS}[user]hi{EOS}\n[assistant]"
    [bos], [eos] = tokenizer.encode(BOS), tokenizer.encode(EOS)
    assert (prompt_token_ids.count(bos), prompt_token_ids.count(eos)) == (1, int(special_in_content))
    tokenized = await harness.post("/tokenize", {"messages": messages})
    assert tokenized.json()["tokens"] == prompt_token_ids
    await harness.post(COMPLETIONS, {"prompt": f"hi{EOS}"})  # special tokens in a prompt are never escaped
    assert harness.engine.calls[1].prompt_token_ids[-1] == eos


async def test_the_rendered_text_counts_against_the_limit() -> None:
    messages = [{"role": "user", "content": ""}] * 3  # each becomes "[user]\n"
    response = await Harness(limits=Limits(prompt_chars=20)).post(CHAT, {"messages": messages})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


DEVELOPER: Any = {"role": "developer", "content": "Be brief"}
PARTS = [{"type": "input_text", "text": "Be brief"}]
LATE: Any = {"role": "system", "content": "Skills: x"}


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        (CHAT, {"messages": [DEVELOPER, *MESSAGES]}, "[system]Be brief[user]hi"),
        (
            RESPONSES,
            {"instructions": "You", "input": [{**DEVELOPER, "content": PARTS}, *MESSAGES]},
            "[system]You\n\nBe brief[user]hi",
        ),
        (
            MESSAGES_ROUTE,
            {"system": "You", "messages": [*MESSAGES, LATE], "max_tokens": 9},
            "[system]You[user]hi\n\nSkills: x",
        ),
        (
            MESSAGES_ROUTE,
            {"system": [{"type": "text", "text": "You"}], "messages": [LATE, *MESSAGES], "max_tokens": 9},
            "[system]You\n\nSkills: x[user]hi",
        ),
    ],
)
async def test_every_route_has_its_roles_adapted(path: str, body: Any, prompt: str) -> None:
    """As Codex and Claude Code send them, to a template that raises for them."""
    harness = Harness(tokenizer=byte_level_tokenizer(chat_template=RAISES_LATE))
    response = await harness.post(path, body)
    assert response.status_code == 200, response.text
    assert harness.tokenizer.decode(harness.engine.calls[0].prompt_token_ids) == prompt


def calling(*arguments: str) -> list[dict[str, Any]]:
    """A message for each call with such arguments."""
    return [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": each}}]}
        for each in arguments
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ['{"a": [' + "[]," * 30_000 + "[]]}"],
        ['{"a": [' + "[]," * 3_000 + "[]]}"] * 10,
        ['"', *['{"a": [' + "[]," * 3_000 + "[]]}"] * 10],
        ["{" + ",".join(['"a":0'] * 120_000) + "}"],
    ],
    ids=["one call", "all calls", "after an open string", "names"],
)
async def test_arguments_of_calls_are_bounded_before_they_are_parsed(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatMessage, "for_template", lambda message: pytest.fail("parses them"))
    response = await Harness().post(CHAT, {"messages": calling(*arguments)})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert "the arguments of its tool calls have more than" in response.text


async def test_brackets_within_texts_of_arguments_are_no_arrays() -> None:
    arguments = json.dumps({"a": "[{" * 20_000})
    response = await Harness(max_seq_len=1_000_000).post(CHAT, {"messages": calling(arguments)})
    assert response.status_code == 200, response.text


async def test_arguments_are_parsed_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    parse = schema.arguments_object

    def arguments_object(arguments: str | None) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return parse(arguments)

    monkeypatch.setattr(schema, "arguments_object", arguments_object)
    assert (await Harness().post(CHAT, {"messages": calling("{}")})).status_code == 200
    assert [name.partition("_")[0] for name in threads] == ["text"]


@pytest.mark.parametrize("special_in_content", [True, False])
@pytest.mark.parametrize("depth", [10, 40, 900, 19_000])
async def test_arguments_that_nest_too_deeply_are_shown_as_they_are(
    special_in_content: bool, depth: int
) -> None:
    template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": template}
    tokenizer = Tokenizer(byte_level_backend(), settings, special_in_content=special_in_content)
    messages = calling('{"a":' * depth + "1" + "}" * depth)
    response = await Harness(tokenizer=tokenizer, max_seq_len=1_000_000).post(CHAT, {"messages": messages})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("special_in_content", [True, False])
async def test_lone_surrogates_in_arguments_are_replaced(special_in_content: bool) -> None:
    template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.a }}{% endfor %}"
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": template}
    tokenizer = Tokenizer(byte_level_backend(), settings, special_in_content=special_in_content)
    harness = Harness(tokenizer=tokenizer)
    response = await harness.post(CHAT, {"messages": calling('{"a": "x\\ud83dy"}')})
    assert response.status_code == 200, response.text
    assert tokenizer.decode(harness.engine.calls[0].prompt_token_ids) == "x\ufffdy"
