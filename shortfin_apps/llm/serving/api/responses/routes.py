"""`/v1/responses`, as OpenAI's clients expect it."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal
from uuid import uuid4

import orjson
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.answers import errors, whole_or_streamed
from shortfin_apps.llm.serving.api.chat import ChatTurn, answer_of, chat_turn
from shortfin_apps.llm.serving.api.generation import submitted
from shortfin_apps.llm.serving.api.json_body import JsonRoute
from shortfin_apps.llm.serving.api.limits import Limits
from shortfin_apps.llm.serving.api.responses import answers
from shortfin_apps.llm.serving.api.responses.answer import ResponseAnswer, ResponseEvents, ResponseShape
from shortfin_apps.llm.serving.api.responses.conversation import NAMES, chat_of_response
from shortfin_apps.llm.serving.api.responses.schema import ResponsesBody
from shortfin_apps.llm.serving.api.responses.store import (
    ResponseStore,
    StoredResponse,
    encoded,
    items_before,
    items_of,
    page_of,
)
from shortfin_apps.llm.serving.api.sampling import params_named
from shortfin_apps.llm.serving.api.schema import ChatBody
from shortfin_apps.llm.serving.api.service import service_of
from shortfin_apps.llm.serving.api.tools import RESPONSE_FORMAT
from shortfin_apps.llm.serving.http.auth import caller_of
from shortfin_apps.llm.serving.http.errors import ResponseNotFoundError
from shortfin_apps.llm.serving.http.json_response import JsonResponse, made, work_of
from shortfin_apps.llm.serving.http.streaming import EventStream

router = APIRouter(route_class=JsonRoute, prefix="/v1", tags=["openai"], responses=errors())

MAX_ITEMS = 100  # in one page of a list, like OpenAI's limit


@router.post("/responses", responses=whole_or_streamed(answers.ResponseAnswer))
async def create(body: ResponsesBody, request: Request) -> Response:
    """Answers a conversation, which may start with a stored response (`previous_response_id`)."""
    service = service_of(request)
    before = _before(body, request)
    is_stored = _is_stored(body, service.responses)
    num_bytes = len(await request.body()) + (0 if before is None else before.num_bytes)
    with params_named(NAMES):
        chat, items = await service.model.generator.workers.run(
            num_bytes, _conversation, body, before, service.limits, is_stored=is_stored
        )
        format_field = "text.format" if body.response_format is None else RESPONSE_FORMAT
        turn = await chat_turn(chat, request, messages_field="input", format_field=format_field)
    answer = _new_answer(body, turn, request, is_stored=is_stored)
    keep = partial(_keep, request, items) if is_stored else _forget
    if body.stream:
        return EventStream(request, ResponseEvents(answer, keep), await submitted(turn.requests, request))
    whole = await answer_of(turn, request)
    await made(service.model.generator.workers, work_of(whole), answer.add, whole)
    response = answer.response()
    keep(response)
    return JsonResponse(response)


@router.get("/responses/{response_id}", responses={200: {"model": answers.ResponseAnswer}})
async def retrieve(response_id: str, request: Request, stream: bool = False) -> Response:
    """Returns a stored response."""
    stored = _stored(response_id, request)
    _refuse_more(request)
    if stream:
        raise InvalidRequestError("`stream`: a stored response is not streamed again; leave it out", "stream")
    return Response(stored.response, media_type=JsonResponse.media_type)


@router.delete("/responses/{response_id}", responses={200: {"model": answers.DeletedResponse}})
async def delete(response_id: str, request: Request) -> Response:
    """Deletes a stored response; later responses of its conversation stay."""
    _stored(response_id, request)
    service_of(request).responses.delete(caller_of(request).digest, response_id)
    return JsonResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/responses/{response_id}/input_items", responses={200: {"model": answers.InputItems}})
async def input_items(
    response_id: str,
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_ITEMS)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """Lists the input items of a stored response: the whole conversation before the response."""
    stored = _stored(response_id, request)
    _refuse_more(request)
    workers = service_of(request).model.generator.workers
    page = await workers.run(len(stored.items), page_of, stored, after=after, limit=limit, order=order)
    return JsonResponse(page)


def _refuse_more(request: Request) -> None:
    """Raise InvalidRequestError for an unsupported `include`. Reasoning is always included."""
    query = request.query_params
    included = {*query.getlist("include"), *query.getlist("include[]")}  # OpenAI's client sends `include[]`
    if included - {"reasoning.encrypted_content"}:
        raise InvalidRequestError("`include`: responses have nothing more here; leave it out", "include")


def _before(body: ResponsesBody, request: Request) -> StoredResponse | None:
    """Return the stored response `previous_response_id`; None without it. Raises ResponseNotFoundError."""
    if body.previous_response_id is None:
        return None
    return _stored(body.previous_response_id, request, "previous_response_id")


def _conversation(
    body: ResponsesBody, before: StoredResponse | None, limits: Limits, *, is_stored: bool
) -> tuple[ChatBody, bytes]:
    """Return the full conversation as a chat and as encoded items to store (b"" unless `is_stored`).

    Raises InvalidRequestError.
    """
    items = items_of(body.input)
    if before is not None:
        items = [*items_before(before, limits), *items]
    return chat_of_response(body, items), encoded(items) if is_stored else b""


def _stored(response_id: str, request: Request, param: str = "response_id") -> StoredResponse:
    """Return a stored response. Raises ResponseNotFoundError, also for a response of another caller."""
    store = service_of(request).responses
    if (stored := store.get(caller_of(request).digest, response_id)) is not None:
        return stored
    reason = "" if store.keeps_any else ": this server stores none; send the whole conversation in `input`"
    raise ResponseNotFoundError(f"there is no response {response_id[:80]!r}{reason}", param)


def _is_stored(body: ResponsesBody, store: ResponseStore) -> bool:
    """Whether to store the response. Raises InvalidRequestError for `store: true` without a store."""
    if body.store and not store.keeps_any:
        raise InvalidRequestError(
            "`store`: this server stores no responses; leave it out, and send the whole conversation in"
            " `input`",
            "store",
        )
    return body.store is not False and store.keeps_any


def _new_answer(body: ResponsesBody, turn: ChatTurn, request: Request, *, is_stored: bool) -> ResponseAnswer:
    service = service_of(request)
    shape = ResponseShape(
        body,
        turn.requests[0],
        code=uuid4().hex,  # not the request id: clients choose it and may repeat it
        created_at=int(service.clock()),
        model=service.name,
        is_stored=is_stored,
    )
    return ResponseAnswer(shape, turn, service.model.generator.tokenizer, service.clock)


def _keep(request: Request, items: bytes, response: dict[str, Any]) -> None:
    """Store the response; set its field `store` to false if the store has no room."""
    store = service_of(request).responses
    owner = caller_of(request).digest
    stored = StoredResponse(response=orjson.dumps(response), items=items)
    response["store"] = store.put(owner, response["id"], stored)


def _forget(response: dict[str, Any]) -> None:
    pass
