"""Chat turns: the code shared by `/v1/chat/completions`, `/v1/responses` and `/v1/messages`.

A route converts its body to a ChatBody. `chat_turn` makes requests of it; `submitted` and `answer_of`
submit them. Errors name the fields of ChatBody; routes with other field names rename them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.contract.errors import InvalidRequestError, RequestAbortedError
from shortfin_apps.llm.serving.api.generation import GenerateRequest, engine_requests
from shortfin_apps.llm.serving.api.json_body import note_unread
from shortfin_apps.llm.serving.api.limits import excess_of
from shortfin_apps.llm.serving.api.schema import ChatBody, ChatMessage, SamplingFields, ServingFields
from shortfin_apps.llm.serving.api.service import Service, service_of
from shortfin_apps.llm.serving.api.tools import (
    AnswerForm,
    ToolUse,
    answer_rules,
    shown_ids,
    template_variables,
    tool_use,
)
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta, TextRequest, TextStream, gather
from shortfin_apps.llm.serving.http.access_log import access_of
from shortfin_apps.llm.serving.http.auth import caller_of
from shortfin_apps.llm.serving.http.streaming import unless_disconnected
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation rendered and tokenised for the model."""

    text: str
    token_ids: tuple[int, ...]
    use: ToolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """A conversation to answer: one request per choice, and how to parse the answers.

    `fills_context`: `max_tokens` was reduced to the free context.
    """

    requests: Sequence[TextRequest]
    form: AnswerForm
    fills_context: bool = False


async def chat_prompt(body: ChatBody, request: Request, *, messages_field: str = "messages") -> ChatPrompt:
    """Render and tokenise. Raises InvalidRequestError if the chat template refuses it or it is too long."""
    service = service_of(request)
    note_unread(body.messages, body.chat_template_kwargs, request, messages_field)
    model = service.model
    use, variables = tool_use(body, model.dialect), template_variables(body, model)
    text = await conversation_text(
        service,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        variables=variables,
        tools=use.shown,
    )
    salt = caller_of(request).cache_salt(body.cache_salt)
    token_ids = await model.generator.encode_conversation(text, salt, "messages")
    return ChatPrompt(text=text, token_ids=token_ids, use=use)


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


async def chat_turn(
    body: ChatBody, request: Request, *, cuts_to_fit: bool = False, messages_field: str = "messages"
) -> ChatTurn:
    """Prepare the requests of a body.

    Raises InvalidRequestError, also if `max_tokens` exceeds the free context, unless `cuts_to_fit`.
    """
    service = service_of(request)
    service.limits.check_body(body)
    model = service.model
    logprobs = _logprobs(body)
    service.limits.check_logprobs(logprobs, "top_logprobs")
    model.generator.check_count(body.n or 1, "n")
    prompt = await chat_prompt(body, request, messages_field=messages_field)
    grammar, form = answer_rules(body, prompt.use, model, prompt.text)
    room = max(model.generator.max_seq_len - len(prompt.token_ids), 1)
    fills_context = cuts_to_fit and body.max_tokens is not None and body.max_tokens > room
    if fills_context:
        body = body.model_copy(update={"max_tokens": room})
    max_tokens_field, max_tokens = _max_tokens(body)
    wanted = GenerateRequest(
        prompt_token_ids=prompt.token_ids,
        sampling=body,
        serving=body,
        defaults=model.openai_defaults,
        prompt_field="messages",
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        default_max_tokens=model.openai_defaults.max_tokens,
        num_answers=body.n or 1,
        logprobs=logprobs,
        logprobs_field="top_logprobs",
        grammar=grammar,
        include_stop=body.include_stop_str_in_output,
        conversation=prompt.text,
        shown_ids=shown_ids(form, model),
    )
    requests = await engine_requests(wanted, request)
    return ChatTurn(requests=requests, form=form, fills_context=fills_context)


async def submitted(turn: ChatTurn, request: Request) -> list[TextStream]:
    """Submit the turn and return its streams. Raises the engine's error if it does not admit all."""
    access = access_of(request)
    access.requests = turn.requests
    access.pending = streams = await service_of(request).model.generator.submit(turn.requests)
    return streams


async def answer_of(turn: ChatTurn, request: Request) -> TextDelta:
    """Return the complete answer of a one-request turn. Raises RequestAbortedError on disconnect."""
    (answer,) = await unless_disconnected(request, gather(await submitted(turn, request)))
    return answer


def _max_tokens(body: ChatBody) -> tuple[str, int | None]:
    """`max_completion_tokens`, or its older name `max_tokens`."""
    if body.max_completion_tokens is None:
        return "max_tokens", body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequestError("`max_tokens` and `max_completion_tokens` disagree", "max_tokens")
    return "max_completion_tokens", body.max_completion_tokens


def _logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequestError("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    return None


def chat_body(body: SamplingFields, **fields: Any) -> ChatBody:
    """Create a chat from the sampling and serving fields of `body`, and `fields`.

    Raises InvalidRequestError for `n` above 1, as the calling routes return one answer.
    """
    if body.n not in (None, 1):
        raise InvalidRequestError("`n` must be 1, as this route gives one answer", "n")
    shared = (*SamplingFields.model_fields, *ServingFields.model_fields)
    return ChatBody(**{name: getattr(body, name) for name in shared} | fields)


def end_of(answer: TextDelta) -> FinishReason | None:
    """Return the finish reason. Raises RequestAbortedError, or its cause, for an aborted answer.

    For routes whose format can express a cut answer only if `max_tokens` was reached.
    """
    if answer.finish_reason is FinishReason.ABORT:
        raise answer.error or RequestAbortedError("the request was aborted")
    return answer.finish_reason
