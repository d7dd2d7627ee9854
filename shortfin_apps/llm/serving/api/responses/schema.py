"""The body of `/v1/responses`, in OpenAI's format plus the sampling fields of the other routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from shortfin_apps.llm.serving.api.schema import (
    MAX_TOOLS,
    NOT_SERVED,
    Body,
    FunctionName,
    SamplingFields,
    ServingFields,
    choice_tag,
    type_of,
)
from shortfin_apps.llm.serving.api.unserved_fields import (
    RESPONSES_CALL_REFUSED,
    RESPONSES_INERT,
    RESPONSES_INSTEAD,
    RESPONSES_ITEM_INERT,
    RESPONSES_REASONING_INERT,
    RESPONSES_REASONING_REFUSED,
    RESPONSES_REFUSED,
    RESPONSES_STREAM_OPTIONS_REFUSED,
    RESPONSES_TEXT_REFUSED,
    RESPONSES_THOUGHT_REFUSED,
    RESPONSES_TOOL_REFUSED,
)

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    """A text part of the client's message or of an earlier answer."""

    INERT = RESPONSES_ITEM_INERT

    type: Literal["input_text", "output_text", "text"]
    text: str


class Refusal(Body):
    """A refusal in an earlier answer. This server never generates one."""

    type: Literal["refusal"]
    refusal: str


class SummaryText(Body):
    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


# Tags appear in the locations of pydantic's errors, so a tag must not be the name of a field.
PART_TAGS = {
    **dict.fromkeys(("input_text", "output_text", "text"), "text part"),
    "refusal": "refusal part",
}


def _part_tag(part: object) -> str | None:
    return PART_TAGS.get(type_of(part) or "")


Part = Annotated[
    Annotated[InputText, Tag("text part")] | Annotated[Refusal, Tag("refusal part")],
    Discriminator(
        _part_tag,
        custom_error_type=NOT_SERVED,
        custom_error_message="a part must be of type `input_text` or `output_text`:"
        " images, files and audio are not supported by this server",
    ),
]
Parts = Annotated[list[Part], Field(fail_fast=True)]


class MessageItem(Body):
    INERT = RESPONSES_ITEM_INERT

    type: Literal["message"] = "message"
    id: str | None = None
    status: Status | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts


class CallItem(Body):
    """A tool call in an earlier answer."""

    REFUSED = RESPONSES_CALL_REFUSED
    INERT = RESPONSES_ITEM_INERT

    type: Literal["function_call"]
    id: str | None = None
    status: Status | None = None
    call_id: str
    name: str
    arguments: str


class ResultItem(Body):
    """The result of a tool call."""

    REFUSED = RESPONSES_CALL_REFUSED
    INERT = RESPONSES_ITEM_INERT

    type: Literal["function_call_output"]
    id: str | None = None
    status: Status | None = None
    call_id: str
    name: str | None = None
    output: str | Parts


class ThoughtItem(Body):
    """The reasoning of an earlier answer."""

    REFUSED = RESPONSES_THOUGHT_REFUSED

    type: Literal["reasoning"]
    id: str | None = None
    status: Status | None = None
    summary: Annotated[list[SummaryText], Field(fail_fast=True)] | None = None
    content: Annotated[list[SummaryText], Field(fail_fast=True)] | None = None


ITEM_TAGS = {
    "message": "message item",
    "function_call": "call item",
    "function_call_output": "result item",
    "reasoning": "thought item",
}


def _item_tag(item: object) -> str | None:
    """Return the union tag of an item; None for an unsupported type. An item with a role needs no `type`."""
    return ITEM_TAGS.get(type_of(item) or ("message" if _has_role(item) else ""))


def _has_role(item: object) -> bool:
    return hasattr(item, "role") or (isinstance(item, Mapping) and "role" in item and "type" not in item)


Item = Annotated[
    Annotated[MessageItem, Tag("message item")]
    | Annotated[CallItem, Tag("call item")]
    | Annotated[ResultItem, Tag("result item")]
    | Annotated[ThoughtItem, Tag("thought item")],
    Discriminator(
        _item_tag,
        custom_error_type=NOT_SERVED,
        custom_error_message="an item must be of type `message`, `function_call`, `function_call_output` or"
        " `reasoning`: references, files, and calls of tools that OpenAI runs are not read by this server",
    ),
]


class ResponsesTool(Body):
    """A function that the client runs. Tools that OpenAI runs have other types, which are refused."""

    REFUSED = RESPONSES_TOOL_REFUSED

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(Body):
    """`tool_choice` that names the function to call."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Body):
    """`tool_choice` that lists the functions that the model may call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(min_length=1, fail_fast=True)]


ChosenTool = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[ChosenFunction, Tag("named tool")] | Annotated[AllowedFunctions, Tag("allowed tool")],
        Discriminator(choice_tag),
    ]
)


class ResponseFormat(Body):
    """The format of answers; schemas are always enforced. `name`, `description`, `strict` have no effect."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_value: dict[str, Any] | None = Field(None, alias="schema")  # `schema` is a method of BaseModel


class ResponseText(Body):
    REFUSED = RESPONSES_TEXT_REFUSED

    format: ResponseFormat | None = None


class ReasoningOptions(Body):
    REFUSED = RESPONSES_REASONING_REFUSED
    INERT = RESPONSES_REASONING_INERT

    effort: str | None = None


class ResponsesStreamOptions(Body):
    REFUSED = RESPONSES_STREAM_OPTIONS_REFUSED


def _texts(metadata: dict[str, Any]) -> dict[str, Any]:
    """Check that all values are strings. Raises one error: `dict[str, str]` would raise one per value."""
    if not all(isinstance(value, str) for value in metadata.values()):
        raise PydanticCustomError("string_type", "Input should be a dictionary of valid strings")
    return metadata


Metadata = Annotated[
    dict[str, Any],
    AfterValidator(_texts),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
]


class ResponsesBody(ServingFields, SamplingFields):
    """Body of `POST /v1/responses`."""

    REFUSED = RESPONSES_REFUSED
    INERT = RESPONSES_INERT
    INSTEAD = RESPONSES_INSTEAD

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    max_output_tokens: int | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: ResponsesStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
