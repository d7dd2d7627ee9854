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

    A template is a program, which may be slow, so a worker thread waits for it, as for the tokenising of long
    texts and the reading of calls' arguments.
    """
    num_chars = sum(message.num_chars for message in messages)
    service.limits.check_chars(num_chars, "messages")
    arguments = [text for message in messages for text in _arguments_of(message)]
    if (excess := excess_of(*arguments)) is not None:
        raise InvalidRequestError(
            f"`messages`: the arguments of its tool calls have more than {excess}", "messages"
        )
    generator = service.model.generator
    text = await generator.workers.run(
        num_chars,
        _rendered,
        generator.tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt is not False,
        variables=variables,
        tools=tools,
    )
    service.limits.check_chars(len(text), "messages")
    return text


def _rendered(tokenizer: Tokenizer, messages: Sequence[ChatMessage], **template_arguments: Any) -> str:
    return tokenizer.apply_chat_template(
        [message.for_template() for message in messages], **template_arguments
    )


def _arguments_of(message: ChatMessage) -> list[bytes]:
    """The arguments of the message's calls that are texts of JSON."""
    given = [call.function.arguments for call in message.tool_calls or ()]
    return [text.encode("utf-8", "surrogatepass") for text in given if isinstance(text, str)]
