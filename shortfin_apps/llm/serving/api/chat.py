"""`/v1/chat/completions`, and the code that it shares with `/v1/responses` and `/v1/messages`.

The other routes convert their body to a ChatBody, from which `chat_turn` creates engine requests. Errors name
fields of ChatBody; the other routes rename these fields in the errors (`params_named`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.contract.errors import InvalidRequestError, RequestAbortedError
from shortfin_apps.llm.serving.api.answers import ChatAnswer, errors, whole_or_streamed
from shortfin_apps.llm.serving.api.generation import (
    Choices,
    Conversation,
    GenerateRequest,
    engine_requests,
    submitted,
)
from shortfin_apps.llm.serving.api.json_body import JsonRoute, note_ignored
from shortfin_apps.llm.serving.api.openai_answers import extras_of, respond
from shortfin_apps.llm.serving.api.openai_shapes import ChatShape
from shortfin_apps.llm.serving.api.schema import ChatBody, SamplingFields, ServingFields
from shortfin_apps.llm.serving.api.service import ServedModel, service_of
from shortfin_apps.llm.serving.api.tools import (
    RESPONSE_FORMAT,
    AnswerForm,
    ToolUse,
    answer_rules,
    template_variables,
    tool_use,
    unused_schema,
)
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta, TextRequest, gather
from shortfin_apps.llm.serving.http.streaming import unless_disconnected

router = APIRouter(route_class=JsonRoute, prefix="/v1", tags=["openai"], responses=errors())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """The engine requests of one conversation, one per choice, and how to parse the answers (`form`).

    `fills_context`: the body's `max_tokens` exceeded the free context and was reduced.
    """

    requests: Sequence[TextRequest]
    form: AnswerForm
    fills_context: bool = False


@router.post("/chat/completions", responses=whole_or_streamed(ChatAnswer))
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answers a conversation."""
    turn = await chat_turn(body, request)
    extras = extras_of(body, request)
    tokenizer = service_of(request).model.generator.tokenizer
    shape = ChatShape(tokenizer, turn.requests[0].prompt_token_ids, extras, turn.form)
    return await respond(request, body, turn.requests, shape, extras)


async def chat_turn(
    body: ChatBody,
    request: Request,
    *,
    cuts_to_fit: bool = False,
    messages_field: str = "messages",
    format_field: str = RESPONSE_FORMAT,
) -> ChatTurn:
    """Create the engine requests of a chat. Raises InvalidRequestError.

    A `max_tokens` above the free context is an error; with `cuts_to_fit`, it is reduced to the free context.
    `messages_field`: the name of `messages` in errors. `format_field`: the name of `response_format` if the
    answer reports it as ignored.
    """
    model = service_of(request).model
    num_answers = body.n or 1
    max_tokens_field, max_tokens = _max_tokens(body)
    choices = Choices(num_answers, num_answers, _logprobs(body))
    conversation, use = conversation_of(body, model)
    grammar, form = answer_rules(body, use, model)
    if (unused := unused_schema(body, use)) is not None:
        note_ignored([format_field if unused == RESPONSE_FORMAT else unused], request)
    wanted = GenerateRequest(
        sampling=body,
        serving=body,
        defaults=model.openai_defaults,
        choices=choices,
        grammar=grammar,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        default_max_tokens=model.openai_defaults.max_tokens,
        cuts_to_fit=cuts_to_fit,
        logprobs_field="top_logprobs",
        include_stop=body.include_stop_str_in_output,
        shown_ids=form.shown_ids(model.generator.tokenizer.special_tokens),
    )
    [requests] = await engine_requests([conversation], messages_field, [wanted], request)
    return ChatTurn(
        requests=requests,
        form=form.after(requests[0].conversation or ""),
        fills_context=max_tokens is not None and requests[0].params.max_tokens < max_tokens,
    )


def conversation_of(body: ChatBody, model: ServedModel) -> tuple[Conversation, ToolUse]:
    """Return the conversation for the chat template, and the tools. Raises InvalidRequestError."""
    use = tool_use(body, model.dialect)
    conversation = Conversation(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        variables=template_variables(body, model),
        tools=use.shown,
    )
    return conversation, use


async def answer_of(turn: ChatTurn, request: Request) -> TextDelta:
    """Submit the only request of `turn` and return its complete answer.

    Raises RequestAbortedError if the client disconnects.
    """
    (answer,) = await unless_disconnected(request, gather(await submitted(turn.requests, request)))
    return answer


def _max_tokens(body: ChatBody) -> tuple[str, int | None]:
    """Return the name and the value of `max_completion_tokens`, or of its older name `max_tokens`.

    Raises InvalidRequestError if the two disagree.
    """
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
    """Create a ChatBody from the sampling and serving fields of `body`; `fields` override or add fields.

    Raises InvalidRequestError for `n` above 1, because the calling routes return one answer.
    """
    if body.n not in (None, 1):
        raise InvalidRequestError("`n` must be 1, as this route gives one answer", "n")
    shared = (*SamplingFields.model_fields, *ServingFields.model_fields)
    return ChatBody(**{name: getattr(body, name) for name in shared} | fields)


def end_of(answer: TextDelta) -> FinishReason | None:
    """Return the finish reason. For an aborted answer, raises the answer's error or RequestAbortedError.

    For routes with an answer format without a finish reason for an aborted answer.
    """
    if answer.finish_reason is FinishReason.ABORT:
        raise answer.error or RequestAbortedError("the request was aborted")
    return answer.finish_reason
