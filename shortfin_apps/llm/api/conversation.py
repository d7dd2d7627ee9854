"""Renders messages to the text of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shortfin_apps.llm.api.limits import excess_of
from shortfin_apps.llm.api.schema import ChatMessage
from shortfin_apps.llm.api.service import Service
from shortfin_apps.llm.components.text.tokenizer import Tokenizer
from shortfin_apps.llm.errors import InvalidRequestError


async def conversation_text(
    service: Service,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The text that the model's chat template renders. Raises InvalidRequestError.

    A template is a program, which may be slow, so it runs in a worker thread, like the parsing of calls'
    arguments and the tokenising of long texts.
    """
    num_chars = _num_chars(messages)
    service.limits.check_chars(num_chars, "messages")
    arguments = [text for message in messages for text in _arguments_of(message)]
    if (excess := excess_of(*arguments)) is not None:
        raise InvalidRequestError(
            f"`messages`: the arguments of its tool calls have more than {excess}", "messages"
        )
    generator = service.model.generator
    text = await generator.workers.run(
        num_chars + sum(map(len, arguments)),
        _render,
        generator.tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt is not False,
        variables=variables,
        tools=tools,
    )
    service.limits.check_chars(len(text), "messages")
    return text


def _render(tokenizer: Tokenizer, messages: Sequence[ChatMessage], **options: Any) -> str:
    try:
        return tokenizer.apply_chat_template([message.for_template() for message in messages], **options)
    except RecursionError:
        raise InvalidRequestError(
            "`messages`: the arguments of a tool call nest too deeply; flatten them", "messages"
        ) from None


def _num_chars(messages: Sequence[ChatMessage]) -> int:
    """Of all contents."""
    contents = [message.content or "" for message in messages]
    return sum(len(c) if isinstance(c, str) else sum(len(part.text) for part in c) for c in contents)


def _arguments_of(message: ChatMessage) -> list[bytes]:
    """The arguments of the message's calls that are texts of JSON."""
    given = [call.function.arguments for call in message.tool_calls or ()]
    return [text.encode("utf-8", "surrogatepass") for text in given if isinstance(text, str)]
