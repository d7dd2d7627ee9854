"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`, in Anthropic's format.

`/v1/messages` also accepts the sampling fields of the other routes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from shortfin_apps.llm.serving.api.schema import (
    MAX_TOOLS,
    NOT_SERVED,
    Body,
    FunctionName,
    SamplingFields,
    ServingFields,
    Strings,
    type_of,
)
from shortfin_apps.llm.serving.api.unserved_fields import (
    BLOCK_INERT,
    COUNT_TOKENS_INERT,
    COUNT_TOKENS_REFUSED,
    MESSAGES_INERT,
    MESSAGES_INSTEAD,
    MESSAGES_REFUSED,
    MESSAGES_TOOL_INERT,
    MESSAGES_TOOL_REFUSED,
    TEXT_BLOCK_REFUSED,
    TOOL_RESULT_REFUSED,
    TOOL_USE_REFUSED,
)


class TextBlock(Body):
    REFUSED = TEXT_BLOCK_REFUSED
    INERT = BLOCK_INERT

    type: Literal["text"]
    text: str


def _not_other(block: object) -> object:
    if (type_of(block) or "text") != "text":
        raise PydanticCustomError(
            NOT_SERVED,
            "a block must be of type `text` here: images, documents and other blocks are not supported by"
            " this server",
        )
    return block


TextBlocks = Annotated[
    list[Annotated[TextBlock, BeforeValidator(_not_other)]], Field(fail_fast=True)
]  # content of `system` and of tool results


class ToolUseBlock(Body):
    """A tool call in an assistant's message."""

    REFUSED = TOOL_USE_REFUSED
    INERT = BLOCK_INERT

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Body):
    """The result of a tool call, in a user's message."""

    REFUSED = TOOL_RESULT_REFUSED
    INERT = BLOCK_INERT

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | TextBlocks | None = None
    is_error: bool | None = None


class ThinkingBlock(Body):
    """Reasoning in an assistant's message; the signature is ignored."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


# Tags appear in the locations of pydantic's errors, so a tag must not be the name of a field.
BLOCK_TAGS = {kind: f"{kind} block" for kind in ("text", "tool_use", "tool_result", "thinking")}


Block = Annotated[
    Annotated[TextBlock, Tag("text block")]
    | Annotated[ToolUseBlock, Tag("tool_use block")]
    | Annotated[ToolResultBlock, Tag("tool_result block")]
    | Annotated[ThinkingBlock, Tag("thinking block")],
    Discriminator(
        lambda block: BLOCK_TAGS.get(type_of(block) or ""),
        custom_error_type=NOT_SERVED,
        custom_error_message="a block must be of type `text`, `tool_use`, `tool_result` or `thinking`:"
        " images, documents and other blocks are not supported by this server",
    ),
]


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class MessagesTool(Body):
    """A function that the client runs. Tools that Anthropic runs have other types, which are refused."""

    REFUSED = MESSAGES_TOOL_REFUSED
    INERT = MESSAGES_TOOL_INERT

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class MessagesToolChoice(Body):
    """The tool choice. `name`: the function to call, required by the type `tool` and only allowed with it."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_value: dict[str, Any] = Field(alias="schema")  # `schema` is a method of BaseModel


class OutputConfig(Body):
    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: str | None = None


class ConversationFields(Body):
    """The fields that determine a prompt."""

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: str | TextBlocks | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CountTokensBody(ConversationFields):
    """Body of `POST /v1/messages/count_tokens`."""

    REFUSED = COUNT_TOKENS_REFUSED
    INERT = COUNT_TOKENS_INERT


class MessagesBody(ConversationFields, ServingFields, SamplingFields):
    """Body of `POST /v1/messages`."""

    REFUSED = MESSAGES_REFUSED
    INERT = MESSAGES_INERT
    INSTEAD = MESSAGES_INSTEAD

    max_tokens: int
    stop_sequences: Strings | None = None
    metadata: Metadata | None = None
