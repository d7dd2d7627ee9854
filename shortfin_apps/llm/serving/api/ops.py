"""Routes for operators, load balancers and tools: health, metrics, versions and the tokenizer.

Some routes have SGLang's or vLLM's names, so that tools for these servers work.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from shortfin_apps.llm import __version__
from shortfin_apps.llm.components.request.messages import MAX_PRIORITY, Terms
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.errors import InvalidRequestError, LlmError, OverloadedError
from shortfin_apps.llm.contract.iree_release import installed_version
from shortfin_apps.llm.serving.api import answers
from shortfin_apps.llm.serving.api.generation import Conversation, rendered
from shortfin_apps.llm.serving.api.json_body import JsonRoute
from shortfin_apps.llm.serving.api.schema import DetokenizeBody, TokenizeBody
from shortfin_apps.llm.serving.api.service import Service, carry_out_everywhere, request_id_of, service_of
from shortfin_apps.llm.serving.engine_link.messages import ReadMetrics
from shortfin_apps.llm.serving.frontend.text_stream import TextRequest, gather
from shortfin_apps.llm.serving.http.auth import caller_of
from shortfin_apps.llm.serving.http.json_response import JsonResponse
from shortfin_apps.llm.serving.text.tokenizer import first_out_of_range

router = APIRouter(route_class=JsonRoute, tags=["ops"], responses=answers.errors())


@router.get("/health", responses=answers.health(ok="the engine works", not_ok="it is stuck or stopped"))
async def health(request: Request) -> Response:
    """200 while the engine makes progress or has no work, 503 with the reason otherwise."""
    problem = service_of(request).problem
    if problem is None:
        return JsonResponse({"status": "healthy"})
    return JsonResponse({"status": "not healthy", "reason": problem}, status_code=503)


@router.get("/ready", responses=answers.health(ok="requests are accepted", not_ok="loading or draining"))
async def ready(request: Request) -> Response:
    """200 when requests are accepted, 503 while the model loads or the server drains."""
    return _state("ready", service_of(request).ready)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    service = service_of(request)
    counts = await carry_out_everywhere(ReadMetrics(), service)
    return Response(service.metrics.exposition(counts), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/version")
async def versions() -> Response:
    libraries = ("shortfin", "iree-base-runtime", "tokenizers")
    return JsonResponse({"version": __version__, **{name: installed_version(name) for name in libraries}})


@router.get("/server_info", responses={200: {"model": answers.ServerInfo}})
async def server_info(request: Request) -> Response:
    """The effective configuration of the server and of the model."""
    service = service_of(request)
    return JsonResponse(
        {
            "version": __version__,
            "served_model_name": service.name,
            "server": service.config,
            "model": service.model_info,
        }
    )


@router.post("/tokenize", responses={200: {"model": answers.TokenizeAnswer}})
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Token ids of a text, or of a conversation rendered by the chat template."""
    service = service_of(request)
    generator = service.model.generator
    special = body.add_special_tokens is not False
    text = body.prompt or ""
    service.limits.check_chars(len(text), "prompt")
    if body.messages is not None:
        conversation = Conversation(
            messages=body.messages,
            add_generation_prompt=body.add_generation_prompt,
            variables=body.chat_template_kwargs,
            tools=[tool.for_template() for tool in body.tools or ()],
        )
        text = await rendered(conversation, "messages", request)
        special = body.add_special_tokens is True
    is_rendered = body.messages is not None
    token_ids = await generator.encode(text, add_special_tokens=special, rendered=is_rendered)
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": generator.max_seq_len,
        "tokens": token_ids,
    }
    names = None
    if body.return_token_strs:
        names = await generator.workers.run(len(token_ids), generator.tokenizer.names, token_ids)
    return JsonResponse({**answer, "token_strs": names})


@router.post("/detokenize", responses={200: {"model": answers.DetokenizeAnswer}})
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Text of token ids, special tokens included."""
    service = service_of(request)
    tokenizer = service.model.generator.tokenizer
    service.limits.check_chars(len(body.tokens), "tokens")  # a token has at least one character
    if (bad_id := first_out_of_range(body.tokens, tokenizer.vocab_size)) is not None:
        raise InvalidRequestError(
            f"`tokens`: token id {bad_id} is not in [0, {tokenizer.vocab_size})", "tokens"
        )
    text = await service.model.generator.workers.run(
        len(body.tokens), tokenizer.decode, body.tokens, skip_special_tokens=False
    )
    return JsonResponse({"prompt": text})


def _state(word: str, ok: bool) -> Response:
    return JsonResponse({"status": word if ok else f"not {word}"}, status_code=200 if ok else 503)


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
    """Whether the engine answers the probe in time. A healthy engine with a full queue counts as True."""
    try:
        async with asyncio.timeout(service.probe_timeout_s):
            await gather(await service.model.generator.submit([probe]))
    except OverloadedError:
        return service.healthy  # a full queue is no fault; the watchdog detects a stuck engine
    except (LlmError, TimeoutError):
        return False
    return True


@router.get("/get_model_info", responses={200: {"model": answers.ModelInfo}})
async def get_model_info(request: Request) -> Response:
    """SGLang's description of the model; its paths are the served model name."""
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
    """The answer of `/load` in SGLang's format: a list with one element, for the only engine."""
    return JsonResponse([await _load(service_of(request))])


async def _load(service: Service) -> dict[str, Any]:
    engine = service.model.generator.engine
    if service.everywhere is not None:  # refresh `engine.stats()` from the engine's process
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
