"""Renders messages to the text of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shortfin_apps.llm.api.schema import ChatMessage
from shortfin_apps.llm.api.service import Service


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
    texts.
    """
    plain_messages = [message.for_template() for message in messages]
    num_chars = sum(len(message["content"]) for message in plain_messages)
    service.limits.check_chars(num_chars, "messages")
    generator = service.model.generator
    text = await generator.workers.run(
        num_chars,
        generator.tokenizer.apply_chat_template,
        plain_messages,
        add_generation_prompt=add_generation_prompt is not False,
        variables=variables,
        tools=tools,
    )
    service.limits.check_chars(len(text), "messages")
    return text
