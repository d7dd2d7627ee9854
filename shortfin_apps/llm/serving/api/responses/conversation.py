"""Converts a body of `/v1/responses` to a ChatBody with the same prompt and answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.chat import chat_body
from shortfin_apps.llm.serving.api.responses.schema import (
    AllowedFunctions,
    CallItem,
    ChosenFunction,
    InputText,
    Item,
    MessageItem,
    Part,
    ResponseFormat,
    ResponsesBody,
    ResponsesTool,
    ResultItem,
    ThoughtItem,
)
from shortfin_apps.llm.serving.api.schema import (
    AllowedToolChoice,
    AllowedTools,
    CalledFunction,
    ChatBody,
    ChatMessage,
    FunctionSpec,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
)

# Field of ChatBody to this route's name, for error messages.
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
}


def chat_of_response(body: ResponsesBody, items: Sequence[Item]) -> ChatBody:
    """Convert a body to a chat. `items`: the items of earlier responses, then of the body's input.

    Raises InvalidRequestError for a field that a chat does not support.
    """
    if body.max_tokens is not None and body.max_output_tokens is not None:
        raise InvalidRequestError("`max_tokens` and `max_output_tokens`: give one of them", "max_tokens")
    form = None if body.text is None else body.text.format
    if form is not None and body.response_format is not None:
        raise InvalidRequestError("`response_format` and `text.format`: give one of them", "response_format")
    changed: dict[str, Any] = {}
    if body.max_output_tokens is not None:
        changed["max_tokens"] = body.max_output_tokens
    if form is not None:
        changed["response_format"] = _response_format(form)
    messages = messages_of(items)
    if body.instructions is not None:
        messages.insert(0, ChatMessage(role="system", content=body.instructions))
    return chat_body(
        body,
        model=body.model,
        messages=messages,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        include_reasoning=body.include_reasoning,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        **changed,
    )


def messages_of(items: Iterable[Item]) -> list[ChatMessage]:
    """Convert items to chat messages: reasoning, text and tool calls of one answer become one message."""
    messages: list[ChatMessage] = []
    for item in items:
        match item:
            case MessageItem():
                _add_message(messages, item)
            case ThoughtItem():
                thought = "".join(part.text for part in item.content or item.summary or ())
                messages.append(ChatMessage(role="assistant", reasoning_content=thought))
            case CallItem():
                _add_call(messages, item)
            case ResultItem():
                extra: dict[str, Any] = {"tool_call_id": item.call_id}
                if item.name is not None:
                    extra["name"] = item.name
                messages.append(ChatMessage(role="tool", content=_text(item.output), **extra))
    return messages


def _add_message(messages: list[ChatMessage], item: MessageItem) -> None:
    text, last = _text(item.content), messages[-1] if messages else None
    if item.role == "assistant" and last is not None and _is_open(last):
        last.content = text
    else:
        messages.append(ChatMessage(role=item.role, content=text))


def _add_call(messages: list[ChatMessage], item: CallItem) -> None:
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant"))
    function = CalledFunction(name=item.name, arguments=item.arguments)
    call = ToolCall(id=item.call_id, type="function", function=function)
    if messages[-1].tool_calls is None:
        messages[-1].tool_calls = []
    messages[-1].tool_calls.append(call)


def _is_open(message: ChatMessage) -> bool:
    """Whether the message has only reasoning so far, so that the answer's text belongs to it."""
    return message.role == "assistant" and message.content is None and not message.tool_calls


def _text(content: str | Sequence[Part]) -> str:
    """Join parts by line ends, like the parts of a chat message."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, InputText) else part.refusal for part in content)


def _response_format(form: ResponseFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": "json_schema", "json_schema": {"schema": form.schema_value}}


def _tool(tool: ResponsesTool) -> Tool:
    return Tool(
        type="function",
        function=FunctionSpec(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        ),
    )


def _tool_choice(choice: str | ChosenFunction | AllowedFunctions | None) -> ToolChoice | None:
    match choice:
        case ChosenFunction():
            return _named(choice)
        case AllowedFunctions():
            allowed = AllowedTools(mode=choice.mode, tools=[_named(each) for each in choice.tools])
            return AllowedToolChoice(type="allowed_tools", allowed_tools=allowed)
        case _:
            return choice  # type: ignore[return-value]  # the schema admits only strings of ToolChoice


def _named(choice: ChosenFunction) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=choice.name))
