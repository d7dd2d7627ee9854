"""Converts a body in Anthropic's format to a ChatBody with the same prompt and answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.anthropic.schema import (
    ConversationFields,
    InputMessage,
    MessagesBody,
    MessagesTool,
    MessagesToolChoice,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from shortfin_apps.llm.serving.api.chat import chat_body
from shortfin_apps.llm.serving.api.schema import (
    BUDGET_FIELDS,
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
from shortfin_apps.llm.serving.api.service import ServedModel

# Field of ChatBody to Anthropic's name, for error messages.
NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
THINKING_VARIABLE = "enable_thinking"  # in chat templates of models whose reasoning can be disabled


def chat_of_messages(body: MessagesBody, model: ServedModel) -> ChatBody:
    """Convert the body to a chat. Raises InvalidRequestError for unsupported fields or content."""
    if body.stop is not None and body.stop_sequences is not None:
        raise InvalidRequestError("`stop` and `stop_sequences`: give one of them", "stop")
    schema = None if body.output_config is None else body.output_config.format
    if schema is not None and body.response_format is not None:
        raise InvalidRequestError(
            "`response_format` and `output_config.format`: give one of them", "response_format"
        )
    changed: dict[str, Any] = {}
    if schema is not None:
        form = {"type": "json_schema", "json_schema": {"schema": schema.schema_value}}
        changed["response_format"] = form
    if body.stop_sequences is not None:
        changed["stop"] = body.stop_sequences
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        if any(getattr(body, name) is not None for name in BUDGET_FIELDS):
            raise InvalidRequestError(
                f"`thinking.budget_tokens` and `{BUDGET_FIELDS[0]}`: give one of them", BUDGET_FIELDS[0]
            )
        changed["thinking_token_budget"] = body.thinking.budget_tokens
    if body.metadata is not None and body.metadata.user_id is not None:
        changed["user"] = body.metadata.user_id
    return chat_body(body, **changed, **_conversation(body, model))


def chat_to_count(body: ConversationFields, model: ServedModel) -> ChatBody:
    """Return a ChatBody with the prompt of `body`. Raises InvalidRequestError for unsupported content."""
    return ChatBody(**_conversation(body, model))


def _conversation(body: ConversationFields, model: ServedModel) -> dict[str, Any]:
    messages = [message for each in body.messages for message in _messages(each)]
    if messages[-1].role == "assistant":
        raise InvalidRequestError(
            "`messages`: an answer whose beginning is given in a last message of the assistant is not"
            " supported by this server; end with a message of the user",
            "messages",
        )
    if body.system is not None:
        messages.insert(0, ChatMessage(role="system", content=_text(body.system)))
    choice, thinking = body.tool_choice, body.thinking
    return {
        "model": body.model,
        "messages": messages,
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": None if choice is None else _tool_choice(choice),
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "chat_template_kwargs": {**_variables(thinking, model), **(body.chat_template_kwargs or {})},
        "include_reasoning": False if thinking and thinking.display == "omitted" else None,
        "reasoning_effort": None if body.output_config is None else body.output_config.effort,
    }


def _messages(message: InputMessage) -> Iterator[ChatMessage]:
    """Yield the chat messages for one message of the body.

    An assistant message becomes one chat message. Each tool result of a user message becomes a separate one.
    """
    if isinstance(message.content, str):
        yield ChatMessage(role=message.role, content=message.content)
    elif message.role == "assistant":
        yield _assistant_message(message)
    else:
        yield from _other_messages(message)


def _assistant_message(message: InputMessage) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = CalledFunction(name=block.name, arguments=block.input)
                calls.append(ToolCall(id=block.id, type="function", function=function))
            case _:
                raise _misplaced(block, message.role)
    return ChatMessage(
        role="assistant",
        content="".join(texts),
        tool_calls=calls or None,
        reasoning_content="".join(thoughts) or None,
    )


def _other_messages(message: InputMessage) -> Iterator[ChatMessage]:
    texts: list[TextBlock] = []
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block)
            case ToolResultBlock() if message.role == "user":
                if texts:
                    yield ChatMessage(role=message.role, content=_text(texts))
                texts = []
                yield _result(block)
            case _:
                raise _misplaced(block, message.role)
    if texts or not message.content:
        yield ChatMessage(role=message.role, content=_text(texts))


def _result(block: ToolResultBlock) -> ChatMessage:
    """Return a message of the role `tool`. A true `is_error` is passed to the chat template."""
    extra: dict[str, Any] = {"tool_call_id": block.tool_use_id}
    if block.is_error:
        extra["is_error"] = True
    return ChatMessage(role="tool", content=_text(block.content or ""), **extra)


def _misplaced(block: object, role: str) -> InvalidRequestError:
    kind = getattr(block, "type", "")
    return InvalidRequestError(
        f"`messages.content`: a message of the role `{role}` has no block of type `{kind}`",
        "messages.content",
    )


def _text(content: str | list[TextBlock]) -> str:
    """Join text blocks by line ends, like the parts of a chat message."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tool(tool: MessagesTool) -> Tool:
    return Tool(
        type="function",
        function=FunctionSpec(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        ),
    )


def _tool_choice(choice: MessagesToolChoice) -> ToolChoice:
    """Convert the tool choice. Raises InvalidRequestError for only one of `name` and the type `tool`."""
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequestError(
            "`tool_choice.name` goes with the type `tool`, which needs it", "tool_choice.name"
        )
    if choice.name is not None:
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]  # type: ignore[return-value]


def _variables(thinking: Thinking | None, model: ServedModel) -> Mapping[str, Any]:
    """Return the chat template's variables that enable or disable reasoning; empty if there are none.

    Raises InvalidRequestError if the model does not support the requested setting.
    """
    if thinking is None:
        return {}
    if THINKING_VARIABLE in (model.generator.tokenizer.tool_template_source or ""):
        return {THINKING_VARIABLE: thinking.type != "disabled"}
    thinks = model.dialect.reasoning is not None
    if thinking.type == "enabled" and not thinks:
        raise InvalidRequestError("`thinking`: this model does not think; leave it out", "thinking")
    if thinking.type == "disabled" and thinks:
        raise InvalidRequestError(
            "`thinking`: this model cannot be told not to think; leave it out, or hide its thoughts with"
            " `display` set to `omitted`",
            "thinking",
        )
    return {}
