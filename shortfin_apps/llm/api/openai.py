"""`/v1/completions`, `/v1/chat/completions` and `/v1/models`, as OpenAI's clients expect them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shortfin_apps.llm.api.access_log import access_of
from shortfin_apps.llm.api.answers import (
    ChatAnswer,
    CompletionAnswer,
    ModelCard,
    ModelList,
    errors,
    whole_or_streamed,
)
from shortfin_apps.llm.api.auth import caller_of
from shortfin_apps.llm.api.best_of import Choices, choices_of
from shortfin_apps.llm.api.conversation import conversation_text
from shortfin_apps.llm.api.json_body import JsonResponse, JsonRoute, check_fields
from shortfin_apps.llm.api.model_name import check_model
from shortfin_apps.llm.api.openai_events import ChunkEvents
from shortfin_apps.llm.api.openai_shapes import ChatShape, CompletionShape, Extras, Shape, usage
from shortfin_apps.llm.api.sampling import params_named, sampling_params, stop_strings
from shortfin_apps.llm.api.schema import ChatBody, CompletionBody, OpenAIBody
from shortfin_apps.llm.api.service import ServedModel, Service, request_id_of, service_of
from shortfin_apps.llm.api.streaming import EventStream, unless_disconnected
from shortfin_apps.llm.api.structured_output import compiled_grammar
from shortfin_apps.llm.api.terms import terms_of
from shortfin_apps.llm.api.tools import answer_form, answer_grammar, shown_ids, template_variables, tool_use
from shortfin_apps.llm.components.frontend.prompt_scoring import prompt_logprobs, scoring_request
from shortfin_apps.llm.components.frontend.text_generation import TextGenerator, with_seed
from shortfin_apps.llm.components.frontend.text_stream import (
    EMPTY_ANSWER,
    TextDelta,
    TextRequest,
    gather,
)
from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.components.text.tokenizer import Tokenizer
from shortfin_apps.llm.errors import InvalidRequestError

router = APIRouter(route_class=JsonRoute, prefix="/v1", tags=["openai"], responses=errors())

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat answer may fill the context


@router.post("/completions", responses=whole_or_streamed(CompletionAnswer))
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continues one prompt or a batch of them."""
    service = service_of(request)
    model = _prepare(service, body, request)
    service.limits.check_choices(None, None, best_of=body.best_of)
    service.limits.check_logprobs(body.logprobs, "logprobs")
    choices = choices_of(body, body.logprobs, stream=body.stream)
    batch = _batch(body, service, choices)
    grammar = await compiled_grammar(body, model.generator)
    prompts = await _prompt_ids(batch, body, model.generator)
    requests = [
        request_
        for prompt_token_ids in prompts
        for request_ in _requests(
            body,
            request,
            prompt_token_ids,
            prompt_field="prompt",
            max_tokens=("max_tokens", body.max_tokens),
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            logprobs=choices.computed_logprobs,
            choices=choices,
            grammar=grammar,
        )
    ]
    echoes = _echoes(batch, choices.returned, model.generator.tokenizer) if body.echo else None
    extras = _extras(body, body.logprobs if body.echo else None)
    returned = choices.of_returned(requests)
    shape = CompletionShape(model.generator.tokenizer, returned, echoes, extras)
    scorings = _scorings(returned, extras)
    return await _respond(request, body, model, requests, shape, scorings, choices)


@router.post("/chat/completions", responses=whole_or_streamed(ChatAnswer))
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answers a conversation."""
    service = service_of(request)
    model = _prepare(service, body, request)
    logprobs = _chat_logprobs(body)
    service.limits.check_logprobs(logprobs, "top_logprobs")
    model.generator.check_count(body.n or 1, "n")
    use = tool_use(body, model.dialect)
    text = await conversation_text(
        service,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        variables=template_variables(body, model),
        tools=use.shown,
    )
    grammar = await answer_grammar(body, use, model, text)
    form = answer_form(body, use, model, text)
    salt = caller_of(request).cache_salt(body.cache_salt)
    requests = _requests(
        body,
        request,
        await model.generator.encode_conversation(text, salt, "messages"),
        prompt_field="messages",
        max_tokens=_chat_max_tokens(body),
        default_max_tokens=None,
        logprobs=logprobs,
        conversation=text,
        grammar=grammar,
        shown_ids=shown_ids(form, model),
    )
    extras = _extras(body, None)
    shape = ChatShape(model.generator.tokenizer, requests[0].prompt_token_ids, extras, form)
    return await _respond(request, body, model, requests, shape, _scorings(requests, extras))


@router.get("/models", responses={200: {"model": ModelList}})
async def models(request: Request) -> Response:
    return JsonResponse({"object": "list", "data": [_model_card(service_of(request))]})


@router.get("/models/{model_id:path}", responses={200: {"model": ModelCard}})
async def model(model_id: str, request: Request) -> Response:
    service = service_of(request)
    check_model(service, model_id)
    return JsonResponse(_model_card(service))


def _prepare(service: Service, body: OpenAIBody, request: Request) -> ServedModel:
    check_model(service, body.model)
    check_fields(body, request)
    service.limits.check_choices(body.n, body.stop)
    service.limits.check_bad_words(body.bad_words)
    service.limits.check_logprobs(body.prompt_logprobs, "prompt_logprobs")
    return service.model


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "shortfin-llm",
        "max_model_len": service.model.generator.max_seq_len,
    }


def _batch(body: CompletionBody, service: Service, choices: Choices) -> list[Any]:
    """The prompts, each a text or a list of token ids."""
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


def _echoes(batch: Sequence[Any], n: int, tokenizer: Tokenizer) -> list[str]:
    """The prompt text of each choice; that of token ids includes special tokens."""
    texts = [p if isinstance(p, str) else tokenizer.decode(p, skip_special_tokens=False) for p in batch]
    return [text for text in texts for _ in range(n)]


def _is_empty(body: OpenAIBody) -> bool:
    """Whether no token is to be generated, which is for completions alone: as in OpenAI's API and in vLLM."""
    return isinstance(body, CompletionBody) and body.max_tokens == 0


def _extras(body: OpenAIBody, echoed_logprobs: int | None) -> Extras:
    """Raises InvalidRequestError where log-probabilities of a prompt would have to be streamed."""
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
    """For each request, the one that scores its prompt, which choices of one prompt share."""
    if extras.scored is None:
        return None
    scorings: list[TextRequest | None] = []
    for request in requests:
        is_new = request.choice == 0
        scorings.append(scoring_request(request, extras.scored) if is_new else scorings[-1])
    return scorings


def _is_ids(prompt: Sequence[object]) -> bool:
    return not prompt or isinstance(prompt[0], int)  # the schema keeps lists uniform


def _requests(
    body: OpenAIBody,
    request: Request,
    prompt_token_ids: tuple[int, ...],
    *,
    prompt_field: str,
    max_tokens: tuple[str, int | None],
    default_max_tokens: int | None,
    logprobs: int | None,
    conversation: str | None = None,
    choices: Choices | None = None,
    grammar: Grammar | None = None,
    shown_ids: frozenset[int] = frozenset(),
) -> list[TextRequest]:
    """The `n` or `best_of` requests of one prompt, the text of which is `conversation` if it is one."""
    max_name, max_value = max_tokens
    model = service_of(request).model
    generator = model.generator
    logprobs_name = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
    with params_named({"max_tokens": max_name, "logprobs": logprobs_name}):
        params = sampling_params(
            body,
            model.openai_defaults,
            tokenizer=generator.tokenizer,
            max_tokens=_max_tokens(
                body, generator, prompt_token_ids, max_value, default_max_tokens, prompt_field
            ),
            logprobs=logprobs,
            output_grammar=grammar,
        )
    return [
        TextRequest(
            request_id=request_id_of(request),
            prompt_token_ids=prompt_token_ids,
            params=with_seed(params, choice),
            stop=stop_strings(body.stop),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            shown_ids=shown_ids,
            cache_salt=caller_of(request).cache_salt(body.cache_salt),
            terms=terms_of(body, request),
            choice=choice,
            conversation=conversation,
            generates=not _is_empty(body),
        )
        for choice in range(choices.generated if choices else body.n or 1)
    ]


def _max_tokens(
    body: OpenAIBody,
    generator: TextGenerator,
    prompt_token_ids: tuple[int, ...],
    max_tokens: int | None,
    default: int | None,
    prompt_field: str,
) -> int:
    """`TextGenerator.fit`, where 0 tokens are asked for as they may be."""
    if max_tokens == 0 and not _is_empty(body):
        raise InvalidRequestError("`max_tokens` must be at least 1", "max_tokens")
    if max_tokens == 0 and body.min_tokens:
        raise InvalidRequestError("`min_tokens` must lie in [0, max_tokens]", "min_tokens")
    return generator.fit(prompt_token_ids, max_tokens, default=default, param=prompt_field)


def _chat_max_tokens(body: ChatBody) -> tuple[str, int | None]:
    """`max_completion_tokens`, or its older name `max_tokens`."""
    if body.max_completion_tokens is None:
        return "max_tokens", body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequestError("`max_tokens` and `max_completion_tokens` disagree", "max_tokens")
    return "max_completion_tokens", body.max_completion_tokens


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequestError("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    return None


async def _respond(
    request: Request,
    body: OpenAIBody,
    model: ServedModel,
    requests: Sequence[TextRequest],
    shape: Shape,
    scorings: Sequence[TextRequest | None] | None = None,
    choices: Choices | None = None,
) -> Response:
    """Answers the requests, whole or streamed. `scorings` score the prompt of each choice, if asked for."""
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
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return EventStream(request, ChunkEvents(shape, head, requests, with_usage=with_usage), streams)
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
    return JsonResponse(await _whole(shape, head | shape.head(scores) | {"usage": totals}, picked))


async def _whole(shape: Shape, head: dict[str, Any], answers: Sequence[TextDelta]) -> dict[str, Any]:
    choices = []
    for index, answer in enumerate(answers):
        choices.append(shape.choice(index, answer))
        await asyncio.sleep(0)  # lets other requests run while many answers are formatted
    return {**head, "object": shape.object_name, "choices": choices}
