"""`/v1/completions`, `/v1/chat/completions` and `/v1/models`, as OpenAI's clients expect them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.answers import (
    ChatAnswer,
    CompletionAnswer,
    ModelCard,
    ModelList,
    errors,
    whole_or_streamed,
)
from shortfin_apps.llm.serving.api.best_of import Choices, choices_of
from shortfin_apps.llm.serving.api.chat import chat_turn
from shortfin_apps.llm.serving.api.generation import GenerateRequest, engine_requests
from shortfin_apps.llm.serving.api.json_body import JsonRoute, check_fields, check_model
from shortfin_apps.llm.serving.api.openai_events import ChunkEvents
from shortfin_apps.llm.serving.api.openai_shapes import ChatShape, CompletionShape, Extras, Shape, usage
from shortfin_apps.llm.serving.api.sampling import NamedTokens
from shortfin_apps.llm.serving.api.schema import ChatBody, CompletionBody, OpenAIBody, StreamOptions
from shortfin_apps.llm.serving.api.service import ServedModel, Service, request_id_of, service_of
from shortfin_apps.llm.serving.api.structured_output import asked_grammar
from shortfin_apps.llm.serving.frontend.prompt_scoring import (
    PromptLogprobs,
    prompt_logprobs,
    scoring_request,
)
from shortfin_apps.llm.serving.frontend.text_generation import TextGenerator
from shortfin_apps.llm.serving.frontend.text_stream import (
    EMPTY_ANSWER,
    TextDelta,
    TextRequest,
    gather,
)
from shortfin_apps.llm.serving.frontend.text_workers import TextWorkers
from shortfin_apps.llm.serving.http.access_log import access_of
from shortfin_apps.llm.serving.http.json_response import JsonResponse
from shortfin_apps.llm.serving.http.logprobs_work import encoded, made, num_logprobs, work_of
from shortfin_apps.llm.serving.http.streaming import EventStream, unless_disconnected

router = APIRouter(route_class=JsonRoute, prefix="/v1", tags=["openai"], responses=errors())

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat answer may fill the context


@router.post("/completions", responses=whole_or_streamed(CompletionAnswer))
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continues one prompt or a batch of them."""
    service = service_of(request)
    check_fields(body, request)
    model = service.model
    service.limits.check_body(body)
    service.limits.check_choices(None, None, best_of=body.best_of)
    service.limits.check_logprobs(body.logprobs, "logprobs")
    choices = choices_of(body, body.logprobs, stream=body.stream)
    batch = _batch(body, service, choices)
    grammar = asked_grammar(body)
    prompts = await _prompt_ids(batch, body, model.generator)
    tokens = NamedTokens.of(body, model.generator.tokenizer.vocab_size)
    requests: list[TextRequest] = []
    for prompt_token_ids in prompts:
        wanted = GenerateRequest(
            prompt_token_ids=prompt_token_ids,
            sampling=body,
            serving=body,
            defaults=model.openai_defaults,
            tokens=tokens,
            prompt_field="prompt",
            max_tokens=body.max_tokens,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            may_be_empty=True,
            num_answers=choices.generated,
            logprobs=choices.computed_logprobs,
            grammar=grammar,
            include_stop=body.include_stop_str_in_output,
        )
        requests += await engine_requests(wanted, request)
    echoes = await _echoes(batch, choices.returned, model.generator) if body.echo else None
    extras = _extras(body, body.logprobs if body.echo else None)
    returned = choices.of_returned(requests)
    shape = CompletionShape(model.generator.tokenizer, returned, echoes, extras)
    scorings = _scorings(returned, extras)
    return await _respond(request, body, model, requests, shape, scorings, choices)


@router.post("/chat/completions", responses=whole_or_streamed(ChatAnswer))
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answers a conversation."""
    check_fields(body, request)
    model = service_of(request).model
    turn = await chat_turn(body, request)
    extras = _extras(body, None)
    prompt_token_ids = turn.requests[0].prompt_token_ids
    shape = ChatShape(model.generator.tokenizer, prompt_token_ids, extras, turn.form)
    return await _respond(request, body, model, turn.requests, shape, _scorings(turn.requests, extras))


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


def _batch(body: CompletionBody, service: Service, choices: Choices) -> list[Any]:
    """Return the prompts, each a text or a list of token ids."""
    prompt = body.prompt
    batch: list[Any] = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    service.limits.check_prompts(batch, "prompt")
    name = "best_of" if choices.are_ranked else "n"
    service.model.generator.check_count(len(batch) * choices.generated, name)
    return batch


async def _prompt_ids(
    batch: Sequence[Any], body: CompletionBody, generator: TextGenerator
) -> list[tuple[int, ...]]:
    special = body.add_special_tokens is not False
    prompts = []
    for each in batch:
        if isinstance(each, str):
            prompts.append(await generator.encode(each, add_special_tokens=special, param="prompt"))
        else:
            prompts.append(tuple(each))
        await asyncio.sleep(0)  # lets other requests run during a large batch
    return prompts


async def _echoes(batch: Sequence[Any], n: int, generator: TextGenerator) -> list[str]:
    """Return the prompt text of each choice, with special tokens if it was given as token ids."""
    decode = partial(generator.tokenizer.decode, skip_special_tokens=False)
    texts = [p if isinstance(p, str) else await generator.workers.run(len(p), decode, p) for p in batch]
    return [text for text in texts for _ in range(n)]


def _extras(body: OpenAIBody, echoed_logprobs: int | None) -> Extras:
    """Read the fields. Raises InvalidRequestError if prompt log-probabilities would have to be streamed."""
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequestError(
            "`prompt_logprobs` cannot be streamed; leave out `stream`", "prompt_logprobs"
        )
    if body.stream and echoed_logprobs is not None:
        raise InvalidRequestError("`echo` with `logprobs` cannot be streamed; leave out `stream`", "echo")
    return Extras(
        token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs,
        echoed_logprobs=echoed_logprobs,
    )


def _scorings(requests: Sequence[TextRequest], extras: Extras) -> list[TextRequest | None] | None:
    """Return for each request the request that scores its prompt. Choices of one prompt share it."""
    if extras.scored is None:
        return None
    scorings: list[TextRequest | None] = []
    for request in requests:
        is_new = request.choice == 0
        scorings.append(scoring_request(request, extras.scored) if is_new else scorings[-1])
    return scorings


def _is_ids(prompt: Sequence[object]) -> bool:
    return not prompt or isinstance(prompt[0], int)  # the schema keeps lists uniform


async def _respond(
    request: Request,
    body: OpenAIBody,
    model: ServedModel,
    requests: Sequence[TextRequest],
    shape: Shape,
    scorings: Sequence[TextRequest | None] | None = None,
    choices: Choices | None = None,
) -> Response:
    """Answer the requests, complete or streamed. `scorings` score each choice's prompt, if requested."""
    service, access = service_of(request), access_of(request)
    access.requests = requests
    generating = [each for each in requests if each.generates]
    distinct = list({id(each): each for each in scorings or () if each is not None}.values())
    streams = await model.generator.submit([*generating, *distinct])
    access.pending = streams[: len(generating)]
    head = {
        "id": shape.id_prefix + request_id_of(request),
        "created": int(service.clock()),
        "model": service.name,
    }
    if body.stream:
        options = body.stream_options or StreamOptions()
        events = ChunkEvents(
            shape,
            head,
            requests,
            with_usage=bool(options.include_usage),
            with_running_usage=bool(options.continuous_usage_stats),
        )
        return EventStream(request, events, streams)
    answers = await unless_disconnected(request, gather(streams))
    returned = requests if choices is None else [r for r in requests if r.choice < choices.returned]
    of_scoring = dict(zip(map(id, distinct), answers[len(generating) :], strict=True))
    scores = [
        prompt_logprobs(each.prompt_token_ids, of_scoring.get(id(scoring)))
        for each, scoring in zip(returned, scorings or (), strict=False)
    ]
    known = answers[: len(generating)] or [EMPTY_ANSWER] * len(requests)
    totals = usage(requests, [len(a.token_ids) for a in known], [a.num_cached_tokens for a in known])
    picked = choices.pick(known) if choices else known
    workers = model.generator.workers
    return JsonResponse(await _whole(shape, head | {"usage": totals}, scores, picked, workers))


async def _whole(
    shape: Shape,
    head: dict[str, Any],
    scores: Sequence[PromptLogprobs],
    answers: Sequence[TextDelta],
    workers: TextWorkers,
) -> dict[str, Any]:
    """Return the complete answer. Parts are encoded one by one, in a thread if they are large."""
    shared = num_logprobs(scores[0]) if scores else 0
    fields = await made(workers, shared, _encoded_head, shape, scores)
    choices = []
    for index, answer in enumerate(answers):
        count = work_of(answer) + (num_logprobs(scores[index]) if scores else 0)
        choices.append(await made(workers, count, _encoded_choice, shape, index, answer))
    head = {name: encoded(value) for name, value in (head | {"object": shape.object_name}).items()}
    return {**head, **fields, "choices": choices}


def _encoded_head(shape: Shape, scores: Sequence[PromptLogprobs]) -> dict[str, orjson.Fragment]:
    return {name: encoded(value) for name, value in shape.head(scores).items()}


def _encoded_choice(shape: Shape, index: int, answer: TextDelta) -> orjson.Fragment:
    return encoded(shape.choice(index, answer))
