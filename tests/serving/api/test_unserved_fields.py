"""The tables of unsupported fields, compared with the fields of other servers' releases."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import (
    MessageCountTokensParams,
    MetadataParam,
    OutputConfigParam,
    TextBlockParam,
    ThinkingBlockParam,
    ThinkingConfigAdaptiveParam,
    ThinkingConfigEnabledParam,
    ToolParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
)
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseFunctionToolCallParam,
    ResponseOutputMessageParam,
    ResponseReasoningItemParam,
    ResponseTextConfigParam,
)
from openai.types.responses import response_create_params as response_params
from openai.types.shared_params import Reasoning

from shortfin_apps.llm.serving.api.anthropic.schema import (
    CountTokensBody,
    MessagesBody,
    MessagesTool,
    Metadata,
    OutputConfig,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from shortfin_apps.llm.serving.api.json_body import HEADER
from shortfin_apps.llm.serving.api.responses.schema import (
    CallItem,
    MessageItem,
    ReasoningOptions,
    ResponsesBody,
    ResponsesStreamOptions,
    ResponsesTool,
    ResponseText,
    ThoughtItem,
)
from shortfin_apps.llm.serving.api.schema import (
    AbortBody,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    SamplingBody,
    StreamOptions,
    TokenizeBody,
)
from tests.serving.api import field_lists as lists
from tests.serving.api.harness import CHAT, COMPLETIONS, MESSAGES, MESSAGES_ROUTE, RESPONSES, Harness

OTHER_VALUE = "something"  # no table lists it as a value without effect


# Which Anthropic's API takes, though its client's types no longer have them.
FORMER_MESSAGES = ["temperature", "top_k", "top_p", "context_management", "mcp_servers"]


def openai_fields(module: Any, kind: str = "Completion") -> list[str]:
    """Fields of a request in the typed dictionaries of the installed `openai` package."""
    suffixes = ("Base", "NonStreaming", "Streaming")
    return fields_in(*(getattr(module, f"{kind}CreateParams{suffix}") for suffix in suffixes))


def fields_in(*typed: Any) -> list[str]:
    """The keys of typed dictionaries, by the names that are sent."""
    return sorted({key.rstrip("_") for each in typed for key in each.__annotations__})


KNOWN: list[tuple[str, type[Body], list[str]]] = [
    ("openai", CompletionBody, openai_fields(completion_params)),
    ("openai", ChatBody, openai_fields(chat_params)),
    ("openai", StreamOptions, ["include_usage", "include_obfuscation"]),
    ("vllm", CompletionBody, lists.VLLM_COMPLETION + lists.VLLM_FORMER),
    ("vllm", ChatBody, lists.VLLM_CHAT + lists.VLLM_FORMER),
    ("vllm", StreamOptions, lists.VLLM_STREAM_OPTIONS),
    ("vllm", TokenizeBody, lists.VLLM_TOKENIZE),
    ("vllm", DetokenizeBody, lists.VLLM_DETOKENIZE),
    ("sglang", CompletionBody, lists.SGLANG_COMPLETION),
    ("sglang", ChatBody, lists.SGLANG_CHAT),
    ("sglang", StreamOptions, lists.SGLANG_STREAM_OPTIONS),
    ("sglang", TokenizeBody, lists.SGLANG_TOKENIZE),
    ("sglang", DetokenizeBody, lists.SGLANG_DETOKENIZE),
    ("sglang", GenerateBody, lists.SGLANG_GENERATE),
    ("sglang", SamplingBody, lists.SGLANG_SAMPLING),
    ("sglang", AbortBody, lists.SGLANG_ABORT),
    ("llama.cpp", CompletionBody, lists.LLAMA_CPP + lists.LLAMA_CPP_COMPLETION),
    ("llama.cpp", ChatBody, lists.LLAMA_CPP + lists.LLAMA_CPP_CHAT),
    ("llama.cpp", TokenizeBody, lists.LLAMA_CPP_TOKENIZE),
    ("llama.cpp", DetokenizeBody, lists.LLAMA_CPP_DETOKENIZE),
    ("openai", ResponsesBody, openai_fields(response_params, "Response")),
    ("openai", ResponsesTool, fields_in(FunctionToolParam)),
    ("openai", ResponseText, fields_in(ResponseTextConfigParam)),
    ("openai", ReasoningOptions, fields_in(Reasoning)),
    ("openai", ResponsesStreamOptions, fields_in(response_params.StreamOptions)),
    ("openai", CallItem, fields_in(ResponseFunctionToolCallParam)),
    ("openai", ThoughtItem, fields_in(ResponseReasoningItemParam)),
    ("openai", MessageItem, fields_in(EasyInputMessageParam, ResponseOutputMessageParam)),
    ("anthropic", MessagesBody, [*fields_in(MessageCreateParamsStreaming), *FORMER_MESSAGES]),
    ("anthropic", CountTokensBody, fields_in(MessageCountTokensParams)),
    ("anthropic", MessagesTool, fields_in(ToolParam)),
    ("anthropic", TextBlock, fields_in(TextBlockParam)),
    ("anthropic", ToolUseBlock, fields_in(ToolUseBlockParam)),
    ("anthropic", ToolResultBlock, fields_in(ToolResultBlockParam)),
    ("anthropic", ThinkingBlock, fields_in(ThinkingBlockParam)),
    ("anthropic", Thinking, fields_in(ThinkingConfigEnabledParam, ThinkingConfigAdaptiveParam)),
    ("anthropic", OutputConfig, fields_in(OutputConfigParam)),
    ("anthropic", Metadata, fields_in(MetadataParam)),
    ("shortfin", GenerateBody, lists.SHORTFIN_GENERATE),
    ("shortfin", SamplingBody, lists.SHORTFIN_SAMPLING),
]


@pytest.mark.parametrize(("server", "body", "names"), KNOWN, ids=[f"{s}-{b.__name__}" for s, b, _ in KNOWN])
def test_every_field_of_other_servers_is_listed(server: str, body: type[Body], names: list[str]) -> None:
    unknown = set(names) - body.model_fields.keys() - body.REFUSED.keys() - body.INERT
    assert not unknown, f"say in unserved_fields.py what becomes of {server}'s"


# For each body: a route, a valid request, and the prefix of the body's fields in it.
PLACES: dict[type[Body], tuple[str, dict[str, Any], str]] = {
    CompletionBody: (COMPLETIONS, {"prompt": "a"}, ""),
    ChatBody: (CHAT, {"messages": MESSAGES}, ""),
    StreamOptions: (COMPLETIONS, {"prompt": "a", "stream": True}, "stream_options."),
    ResponsesBody: (RESPONSES, {"input": "a"}, ""),
    ResponseText: (RESPONSES, {"input": "a"}, "text."),
    ReasoningOptions: (RESPONSES, {"input": "a"}, "reasoning."),
    ResponsesStreamOptions: (RESPONSES, {"input": "a"}, "stream_options."),
    MessagesBody: (MESSAGES_ROUTE, {"messages": MESSAGES, "max_tokens": 9}, ""),
    CountTokensBody: (f"{MESSAGES_ROUTE}/count_tokens", {"messages": MESSAGES}, ""),
    GenerateBody: ("/generate", {"text": "a"}, ""),
    SamplingBody: ("/generate", {"text": "a"}, "sampling_params."),
    AbortBody: ("/abort", {"rid": "r"}, ""),
    TokenizeBody: ("/tokenize", {"prompt": "a"}, ""),
    DetokenizeBody: ("/detokenize", {"tokens": [4]}, ""),
}


def request_with(body: type[Body], fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    path, request, prefix = PLACES[body]
    return path, request | ({prefix.rstrip("."): fields} if prefix else fields)


@pytest.mark.parametrize("body", PLACES)
async def test_refused_fields_are_named(harness: Harness, body: type[Body]) -> None:
    for name in body.REFUSED:
        response = await harness.post(*request_with(body, {name: OTHER_VALUE}))
        assert response.status_code == 400, name
        assert f"`{PLACES[body][2]}{name}`" in response.text
    assert not harness.engine.calls


@pytest.mark.parametrize("body", PLACES)
async def test_values_without_effect_are_accepted(harness: Harness, body: type[Body]) -> None:
    """They are not reported as ignored, either."""
    most = max(len(values) for values in body.REFUSED.values())
    for i in range(most):
        fields = {name: values[i] for name, values in body.REFUSED.items() if i < len(values)}
        response = await harness.post(*request_with(body, fields))
        assert response.status_code == 200, response.text
        assert HEADER not in response.headers
    nulls = dict.fromkeys([*body.REFUSED, *body.INERT, "unknown"])
    response = await harness.post(*request_with(body, nulls))
    assert response.status_code == 200, response.text
    assert HEADER not in response.headers


@pytest.mark.parametrize("body", [body for body in PLACES if body.INERT])
async def test_inert_fields_are_accepted_and_reported(harness: Harness, body: type[Body]) -> None:
    for name in body.INERT:
        response = await harness.post(*request_with(body, {name: OTHER_VALUE}))
        assert response.status_code == 200, name
        assert response.headers[HEADER] == PLACES[body][2] + name


@pytest.mark.parametrize("name", SamplingBody.model_fields)
async def test_sampling_fields_outside_sampling_params_are_refused(harness: Harness, name: str) -> None:
    response = await harness.post("/generate", {"text": "a", name: 1})
    assert response.status_code == 400
    assert f"`{name}` is not supported by this server; put it into `sampling_params`" in response.text


async def test_the_error_names_the_field_to_use_instead(harness: Harness) -> None:
    response = await harness.post(COMPLETIONS, {"prompt": "a", "max_completion_tokens": 5})
    assert "use `max_tokens`" in response.json()["error"]["message"]
