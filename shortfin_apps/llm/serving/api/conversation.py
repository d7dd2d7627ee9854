"""Renders messages to a prompt's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.limits import excess_of
from shortfin_apps.llm.serving.api.schema import ChatMessage
from shortfin_apps.llm.serving.api.service import Service
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer


async def conversation_text(
    service: Service,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Render messages with the model's chat template. Raises InvalidRequestError.

    Templates are programs and may be slow, so this runs in a worker thread, like tokenising long texts and
    parsing the arguments of calls.
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
    """Return the arguments of the message's calls that are given as JSON text."""
    given = [call.function.arguments for call in message.tool_calls or ()]
    return [text.encode("utf-8", "surrogatepass") for text in given if isinstance(text, str)]
