"""`POST /abort` (also SGLang's `/abort_request`): abort requests by id.

The id is the `rid` of `/generate`, the `X-Request-Id` header of any route, or the `id` in an answer of
`/v1/chat/completions`, `/v1/completions` and `/v1/messages`.
An aborted request is answered with the tokens generated so far and the finish reason `abort`. With API
keys, a caller can abort only its own requests.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shortfin_apps.llm.serving.api import answers
from shortfin_apps.llm.serving.api.anthropic.shapes import ID_PREFIX as MESSAGE_ID_PREFIX
from shortfin_apps.llm.serving.api.json_body import JsonRoute
from shortfin_apps.llm.serving.api.openai_shapes import ChatShape, CompletionShape
from shortfin_apps.llm.serving.api.schema import AbortBody
from shortfin_apps.llm.serving.api.service import count_everywhere, service_of
from shortfin_apps.llm.serving.engine_link.messages import AbortRequests
from shortfin_apps.llm.serving.http.auth import caller_of
from shortfin_apps.llm.serving.http.json_response import JsonResponse

router = APIRouter(route_class=JsonRoute, tags=["native"], responses=answers.errors())

ABORTED: answers.DocumentedAnswers = {200: {"model": answers.AbortedAnswer}}


@router.post("/abort", responses=ABORTED)
@router.post("/abort_request", responses=ABORTED)
async def abort(body: AbortBody, request: Request) -> Response:
    """Ends the requests with these ids; unknown ids, also those of finished requests, are ignored."""
    service = service_of(request)
    caller = caller_of(request)
    tenant = None if caller.is_admin else caller.tenant or None
    rids = [body.rid] if isinstance(body.rid, str) else body.rid
    command = AbortRequests(tuple(map(_request_id, rids)), tenant)
    return JsonResponse({"aborted": await count_everywhere(command, service)})


def _request_id(rid: str) -> str:
    for prefix in (ChatShape.id_prefix, CompletionShape.id_prefix, MESSAGE_ID_PREFIX):
        rid = rid.removeprefix(prefix)
    return rid
