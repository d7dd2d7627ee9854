"""`/v1/messages` and `/v1/messages/count_tokens`, as Anthropic's clients expect them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shortfin_apps.llm.serving.api.answer_reader import BlockReader
from shortfin_apps.llm.serving.api.answers import errors, whole_or_streamed
from shortfin_apps.llm.serving.api.anthropic.answers import (
    AnthropicErrorAnswer,
    MessageAnswer,
    TokenCountAnswer,
)
from shortfin_apps.llm.serving.api.anthropic.conversation import NAMES, chat_of_messages, chat_to_count
from shortfin_apps.llm.serving.api.anthropic.schema import CountTokensBody, MessagesBody
from shortfin_apps.llm.serving.api.anthropic.shapes import (
    ID_PREFIX,
    MessageEvents,
    error_shape,
    message,
    stop_of,
    usage_of,
)
from shortfin_apps.llm.serving.api.chat import ChatTurn, answer_of, chat_turn, conversation_of
from shortfin_apps.llm.serving.api.generation import encoded, submitted
from shortfin_apps.llm.serving.api.json_body import JsonRoute
from shortfin_apps.llm.serving.api.receipts import receipt_field
from shortfin_apps.llm.serving.api.sampling import params_named
from shortfin_apps.llm.serving.api.schema import Body, ChatBody
from shortfin_apps.llm.serving.api.service import ServedModel, request_id_of, service_of
from shortfin_apps.llm.serving.api.tools import RESPONSE_FORMAT
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta
from shortfin_apps.llm.serving.http.auth import caller_of
from shortfin_apps.llm.serving.http.errors import register_shape
from shortfin_apps.llm.serving.http.json_response import JsonResponse, made, work_of
from shortfin_apps.llm.serving.http.streaming import EventStream

router = APIRouter(
    route_class=JsonRoute, prefix="/v1", tags=["anthropic"], responses=errors(AnthropicErrorAnswer)
)

register_shape("/v1/messages", error_shape)
register_shape("/v1/messages/count_tokens", error_shape)

BodyT = TypeVar("BodyT", bound=Body)


@router.post("/messages", responses=whole_or_streamed(MessageAnswer))
async def messages(body: MessagesBody, request: Request) -> Response:
    """Answers a conversation."""
    service = service_of(request)
    with params_named(NAMES):
        chat = await _converted(chat_of_messages, body, request)
        format_field = "output_config.format" if body.response_format is None else RESPONSE_FORMAT
        turn = await chat_turn(chat, request, cuts_to_fit=True, format_field=format_field)
    head = {"id": ID_PREFIX + request_id_of(request), "model": service.name}
    if body.stream:
        return EventStream(request, MessageEvents(head, turn), await submitted(turn.requests, request))
    answer = await answer_of(turn, request)
    workers = service.model.generator.workers
    return JsonResponse(await made(workers, work_of(answer), _whole, head, turn, answer))


@router.post("/messages/count_tokens", responses={200: {"model": TokenCountAnswer}})
async def count_tokens(body: CountTokensBody, request: Request) -> Response:
    """Counts the tokens of a conversation without generating an answer."""
    with params_named(NAMES):
        chat = await _converted(chat_to_count, body, request)
        conversation, _ = conversation_of(chat, service_of(request).model)
        salt = caller_of(request).cache_salt(None)
        _, token_ids = await encoded(conversation, "messages", request, salt)
    return JsonResponse({"input_tokens": len(token_ids)})


async def _converted(
    convert: Callable[[BodyT, ServedModel], ChatBody], body: BodyT, request: Request
) -> ChatBody:
    """Convert a body to a chat, in a worker thread if the body is long."""
    model = service_of(request).model
    return await model.generator.workers.run(len(await request.body()), convert, body, model)


def _whole(head: dict[str, str], turn: ChatTurn, answer: TextDelta) -> dict[str, object]:
    reader = BlockReader(turn.form)
    blocks = reader.read_whole(answer.text, is_cut=answer.is_cut)
    prompt_tokens = len(turn.requests[0].prompt_token_ids)
    usage = usage_of(prompt_tokens, answer.num_cached_tokens, len(answer.token_ids))
    whole = message(head, blocks, stop_of(answer, turn, has_calls=reader.has_calls), usage)
    return whole | receipt_field(answer)
