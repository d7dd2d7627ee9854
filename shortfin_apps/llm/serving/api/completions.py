"""`/v1/completions` and `/v1/models`, as OpenAI's clients expect them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shortfin_apps.llm.serving.api.answers import (
    CompletionAnswer,
    ModelCard,
    ModelList,
    errors,
    whole_or_streamed,
)
from shortfin_apps.llm.serving.api.generation import GenerateRequest, choices_of, engine_requests
from shortfin_apps.llm.serving.api.json_body import JsonRoute, check_model
from shortfin_apps.llm.serving.api.openai_answers import extras_of, respond
from shortfin_apps.llm.serving.api.openai_shapes import CompletionShape
from shortfin_apps.llm.serving.api.schema import CompletionBody
from shortfin_apps.llm.serving.api.service import Service, service_of
from shortfin_apps.llm.serving.api.thought_budget import grammar_of_prompt
from shortfin_apps.llm.serving.frontend.text_generation import TextGenerator
from shortfin_apps.llm.serving.http.json_response import JsonResponse

router = APIRouter(route_class=JsonRoute, prefix="/v1", tags=["openai"], responses=errors())

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default; chats have another one


@router.post("/completions", responses=whole_or_streamed(CompletionAnswer))
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continues one prompt or several prompts."""
    model = service_of(request).model
    choices = choices_of(body, body.logprobs, stream=body.stream)
    prompt = body.prompt
    batch: list[Any] = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    wanted = GenerateRequest(
        sampling=body,
        serving=body,
        defaults=model.openai_defaults,
        choices=choices,
        grammar=grammar_of_prompt(body, model.dialect.reasoning),
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        may_be_empty=True,
        include_stop=body.include_stop_str_in_output,
        add_special_tokens=body.add_special_tokens is not False,
    )
    by_prompt = await engine_requests(batch, "prompt", repeat(wanted), request)
    requests = list(chain.from_iterable(by_prompt))
    echoes = await _echoes(batch, choices.returned, model.generator) if body.echo else None
    extras = extras_of(body, request, body.logprobs if body.echo else None)
    shape = CompletionShape(model.generator.tokenizer, choices.of_returned(requests), echoes, extras)
    return await respond(request, body, requests, shape, extras, choices)


@router.get("/models", responses={200: {"model": ModelList}})
async def models(request: Request) -> Response:
    return JsonResponse({"object": "list", "data": [_model_card(service_of(request))]})


@router.get("/models/{model_id:path}", responses={200: {"model": ModelCard}})
async def model(model_id: str, request: Request) -> Response:
    service = service_of(request)
    check_model(service, model_id)
    return JsonResponse(_model_card(service))


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "shortfin-llm",
        "max_model_len": service.model.generator.max_seq_len,
    }


async def _echoes(batch: Sequence[Any], n: int, generator: TextGenerator) -> list[str]:
    """Return the prompt text of each choice; a prompt given as token ids is decoded with special tokens."""
    decode = partial(generator.tokenizer.decode, skip_special_tokens=False)
    texts = [p if isinstance(p, str) else await generator.workers.run(len(p), decode, p) for p in batch]
    return [text for text in texts for _ in range(n)]


def _is_ids(prompt: Sequence[object]) -> bool:
    return not prompt or isinstance(prompt[0], int)  # the schema keeps lists uniform
