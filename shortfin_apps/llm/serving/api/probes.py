"""Probes with SGLang's and vLLM's names, for load balancers and tools made for these servers."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shortfin_apps.llm.components.request.messages import MAX_PRIORITY, Terms
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.errors import LlmError, OverloadedError
from shortfin_apps.llm.serving.api import answers
from shortfin_apps.llm.serving.api.json_body import JsonRoute
from shortfin_apps.llm.serving.api.service import Service, carry_out_everywhere, request_id_of, service_of
from shortfin_apps.llm.serving.engine_link.messages import ReadMetrics
from shortfin_apps.llm.serving.frontend.text_stream import TextRequest, gather
from shortfin_apps.llm.serving.http.auth import caller_of
from shortfin_apps.llm.serving.http.json_response import JsonResponse

router = APIRouter(route_class=JsonRoute, tags=["ops"], responses=answers.errors())

PROBE_PRIORITY = -MAX_PRIORITY  # ahead of the caller's other waiting requests
PROBE_TOKEN_ID = 0  # exists in every vocabulary


@router.get("/live", responses={200: {"model": answers.State}})
async def live() -> Response:
    """200 as long as the process answers, also while the model loads; needs no key."""
    return JsonResponse({"status": "live"})


@router.get(
    "/health_generate",
    responses=answers.health(ok="a token was generated", not_ok="none was, or not in time"),
)
async def health_generate(request: Request) -> Response:
    """Generates one token: 200 if it comes in time, 503 otherwise."""
    probe = TextRequest(
        request_id=request_id_of(request),
        prompt_token_ids=(PROBE_TOKEN_ID,),
        params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        terms=Terms(priority=PROBE_PRIORITY, tenant=caller_of(request).tenant),
    )
    ok = await _generates(service_of(request), probe)
    return JsonResponse({"status": "healthy" if ok else "not healthy"}, status_code=200 if ok else 503)


async def _generates(service: Service, probe: TextRequest) -> bool:
    """Whether the engine answers the probe in time, or works but is too busy to admit it."""
    try:
        async with asyncio.timeout(service.probe_timeout_s):
            await gather(await service.model.generator.submit([probe]))
    except OverloadedError:
        return service.healthy  # a full queue is no fault; the engine's watchdog reports if it is stuck
    except (LlmError, TimeoutError):
        return False
    return True


@router.get("/get_model_info", responses={200: {"model": answers.ModelInfo}})
async def get_model_info(request: Request) -> Response:
    """SGLang's description of a model; paths are the served model name."""
    service = service_of(request)
    return JsonResponse(
        {
            "model_path": service.name,
            "tokenizer_path": service.name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "max_model_len": service.model.generator.max_seq_len,
        }
    )


@router.get("/load", responses={200: {"model": answers.Load}})
async def load(request: Request) -> Response:
    """The engine's load: vLLM's field `server_load` and the fields of `/get_load`."""
    return JsonResponse(await _load(service_of(request)))


@router.get("/get_load", responses={200: {"model": list[answers.Load]}})
async def get_load(request: Request) -> Response:
    """The same as `/load` in SGLang's form, a list with an entry for each engine: here one."""
    return JsonResponse([await _load(service_of(request))])


async def _load(service: Service) -> dict[str, Any]:
    engine = service.model.generator.engine
    if service.everywhere is not None:  # fetches the numbers from the engine's process
        await carry_out_everywhere(ReadMetrics(), service)
    stats = engine.stats()
    num_requests = stats.num_running + stats.num_waiting
    return {
        "server_load": num_requests,
        "dp_rank": 0,
        "num_reqs": num_requests,
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "num_tokens": stats.pages.leased * stats.page_tokens + stats.queue_tokens,
        "num_queue_tokens": stats.queue_tokens,
    }
