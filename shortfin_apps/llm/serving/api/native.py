"""`POST|PUT /generate`: upstream shortfin's answer format, with SGLang's request fields and stream format.

Complete: {"responses": [{"prompt", "responses": [{"text", "output_ids", "meta_info"}, ...]}, ...]}
          with `n` answers to each prompt, or `num_beams` answers, best first
Streamed: data: {"text", "output_ids", "meta_info", "index"}, then data: [DONE];
          `text` and `output_ids` are cumulative, log-probabilities are those of the event's new tokens

`POST /abort` (also SGLang's `/abort_request`) ends requests by id: the `rid` of `/generate`, the
`X-Request-Id` header of any route, or the `id` in an answer of the other routes. An aborted request is
answered with the tokens generated so far. With API keys, a caller can abort only its own requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.components.request.sampling_params import PARAMS
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.answers import (
    AbortedAnswer,
    DocumentedAnswers,
    GenerateAnswer,
    NativeErrorAnswer,
    errors,
    whole_or_streamed,
)
from shortfin_apps.llm.serving.api.anthropic.shapes import ID_PREFIX as MESSAGE_ID_PREFIX
from shortfin_apps.llm.serving.api.generation import (
    Choices,
    GenerateRequest,
    choices_of,
    engine_requests,
    submitted,
    submitted_whole,
)
from shortfin_apps.llm.serving.api.json_body import JsonRoute
from shortfin_apps.llm.serving.api.openai_shapes import ChatShape, CompletionShape
from shortfin_apps.llm.serving.api.sampling import first_given, params_named
from shortfin_apps.llm.serving.api.schema import AbortBody, GenerateBody, SamplingBody
from shortfin_apps.llm.serving.api.service import ServedModel, count_everywhere, request_id_of, service_of
from shortfin_apps.llm.serving.api.thought_budget import grammar_of_prompt
from shortfin_apps.llm.serving.engine_link.messages import AbortRequests
from shortfin_apps.llm.serving.frontend.beam_search import check_num_beams
from shortfin_apps.llm.serving.frontend.prompt_scoring import (
    PromptLogprobs,
    prompt_logprobs,
    scoring_request,
)
from shortfin_apps.llm.serving.frontend.text_stream import (
    EMPTY_ANSWER,
    TextDelta,
    TextRequest,
    gather_answers,
)
from shortfin_apps.llm.serving.http.auth import caller_of
from shortfin_apps.llm.serving.http.errors import CONTEXT_LENGTH_EXCEEDED, Problem, problem_of, register_shape
from shortfin_apps.llm.serving.http.json_response import JsonResponse, encoded, made, num_logprobs
from shortfin_apps.llm.serving.http.streaming import DONE, EventStream, event, unless_disconnected
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute, tags=["native"])

DEFAULT_MAX_TOKENS = 50  # upstream's
MAX_ID_CHARS = 128
PREFIX = "sampling_params."
# Parameters that the engine may refuse for this model: name in the engine to name in a body.
REFUSED_BY_ENGINE = {
    **{name: PREFIX + name for name in ("num_beams", "stop", "stop_token_ids")},
    **{each.name: PREFIX + each.name for each in PARAMS.values() if each.changes_logits},
    "prompt_logprobs": "logprob_start_len",
}
ANSWERS = whole_or_streamed(GenerateAnswer) | errors(NativeErrorAnswer)
ABORTED: DocumentedAnswers = {200: {"model": AbortedAnswer}, **errors()}

T = TypeVar("T")


def native_error(problem: Problem) -> dict[str, Any]:
    """Return an error body in upstream shortfin's format."""
    code = problem.code if problem.code != CONTEXT_LENGTH_EXCEEDED else None  # upstream has no such code
    return {"error": problem.message, "code": code or "INVALID_REQUEST_ARGS", **problem.extra}


register_shape("/generate", native_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The options for one prompt of the body."""

    sampling: SamplingBody
    choices: Choices
    request_id: str
    logprob_start: int | None  # index of the first prompt token to score; None: score none


@router.post("/generate", responses=ANSWERS)
@router.put("/generate", responses=ANSWERS)
async def generate(body: GenerateBody, request: Request) -> Response:
    """Continues one prompt or several prompts."""
    model = service_of(request).model
    prompts, field = _prompts(body)
    service_of(request).limits.check_prompts(prompts, field)  # before any work per prompt
    items = _items(body, len(prompts), request)
    wanted = (_wanted(body, item, model) for item in items)
    by_item = await engine_requests(prompts, field, wanted, request)
    scorings = list(map(_scoring, items, by_item))
    requests = list(chain.from_iterable(by_item))
    new_answer = partial(
        CumulativeAnswer,
        tokenizer=model.generator.tokenizer,
        with_token_texts=body.return_text_in_logprobs is not False,
    )
    if body.stream:
        _refuse_streamed_beams(requests)
        with params_named(REFUSED_BY_ENGINE):
            streams = await submitted(requests, request)
        return EventStream(request, CumulativeEvents(list(map(new_answer, requests))), streams)
    with params_named(REFUSED_BY_ENGINE):
        pending = await submitted_whole(requests, request, list(filter(None, scorings)))
    results = iter(await unless_disconnected(request, gather_answers(pending)))
    known = [next(results) if each.generates else [EMPTY_ANSWER] * each.num_beams for each in requests]
    returned = _returned(items, by_item, known)
    responses = []
    for prompt, item, scoring in zip(prompts, items, scorings, strict=True):
        several = list(islice(returned, item.sampling.n or 1))
        scored = None if scoring is None else next(results)[0]
        count = sum(num_logprobs(delta.logprobs) for _, deltas in several for delta in deltas)
        count += num_logprobs(scored.logprobs) if scored else 0
        make = partial(_prompt_answers, item, several, scored, with_token_ids=bool(body.return_input_ids))
        answers = await made(model.generator.workers, count, make, new_answer)
        responses.append({"prompt": prompt if isinstance(prompt, str) else None, **answers})
    return JsonResponse({"responses": responses})


def _returned(
    items: Sequence[Item], by_item: Sequence[Sequence[TextRequest]], known: Sequence[list[TextDelta]]
) -> Iterator[tuple[TextRequest, list[TextDelta]]]:
    """Yield the answers to send, each with its request. `known`: the answers to each request, in order."""
    rest = iter(known)
    for item, requests in zip(items, by_item, strict=True):
        several = [next(rest) for _ in requests]
        if item.choices.are_ranked:  # a beam search refuses `best_of`, so each request has one answer
            answers = [answer for [answer] in several]
            several = [[each] for each in item.choices.pick(answers)]
        yield from zip(item.choices.of_returned(requests), several, strict=True)


def _scoring(item: Item, requests: Sequence[TextRequest]) -> TextRequest | None:
    """Return the request for log-probabilities of the item's prompt; None if not requested or none exist.

    Raises InvalidRequestError if `logprob_start_len` is outside of the prompt.
    """
    start, num_tokens = item.logprob_start, len(requests[0].prompt_token_ids)
    if start is None or item.choices.logprobs is None:
        return None
    if not 0 <= start < max(1, num_tokens):
        raise InvalidRequestError(
            f"`logprob_start_len` must be -1 or lie in [0, {num_tokens})", "logprob_start_len"
        )
    return scoring_request(requests[0], item.choices.logprobs, start)


def _input_logprobs(item: Item, answer: TextDelta | None, shape: CumulativeAnswer) -> dict[str, Any]:
    """Return SGLang's log-probability fields for the prompt tokens from `logprob_start_len` on.

    Returns an empty dict if prompt log-probabilities are not requested.
    """
    if item.logprob_start is None:
        return {}
    token_ids = shape.request.prompt_token_ids
    scores: PromptLogprobs = prompt_logprobs(token_ids, answer, item.logprob_start)
    scored = list(zip(token_ids[item.logprob_start :], scores, strict=True))
    return {
        "input_token_logprobs": [shape.triple(i, None if lp is None else lp.logprob) for i, lp in scored],
        "input_top_logprobs": [
            None if lp is None else [shape.triple(i, logprob) for i, logprob in lp.top] for _, lp in scored
        ],
    }


def _items(body: GenerateBody, count: int, request: Request) -> list[Item]:
    """Return the options for each of `count` prompts. Raises InvalidRequestError."""
    sampling = _per_prompt("sampling_params", body.sampling_params, count, SamplingBody())
    logprobs, starts = _logprobs(body, count)
    rids = _request_ids(body.rid, count, request_id_of(request))
    return [
        Item(
            sampling=params,
            choices=choices_of(params, wanted, stream=body.stream, prefix=PREFIX),
            request_id=rid,
            logprob_start=start,
        )
        for params, wanted, rid, start in zip(sampling, logprobs, rids, starts, strict=True)
    ]


def _wanted(body: GenerateBody, item: Item, model: ServedModel) -> GenerateRequest:
    """Return what to generate for the item. Raises InvalidRequestError for options that exclude beams."""
    sampling = item.sampling
    num_beams = _num_beams(sampling, model)
    grammar = grammar_of_prompt(sampling, model.dialect.reasoning, PREFIX)
    if num_beams > 1 and grammar is not None:
        raise InvalidRequestError(
            f"structured output and budgets of reasoning cannot be combined with {num_beams} beams;"
            f" set `{PREFIX}num_beams` to 1",
            PREFIX + "num_beams",
        )
    names = ("max_completion_tokens", "max_new_tokens", "max_tokens")
    max_tokens_field, max_tokens = first_given(sampling, *names, prefix=PREFIX)
    return GenerateRequest(
        sampling=sampling,
        serving=body,
        defaults=model.native_defaults,
        choices=item.choices,
        grammar=grammar,
        prefix=PREFIX,
        max_tokens=max_tokens,
        max_tokens_field=PREFIX + max_tokens_field,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        may_be_empty=True,
        logprobs_field="top_logprobs_num",
        include_stop=sampling.no_stop_trim,
        num_beams=num_beams,
        request_id=item.request_id,
    )


def _logprobs(body: GenerateBody, count: int) -> tuple[list[int | None], list[int | None]]:
    """Return two lists with one value per prompt. Raises InvalidRequestError.

    First list: the number of top log-probabilities to return; None: no log-probabilities at all.
    Second list: the index of the first prompt token to score; None: no prompt token is scored.
    """
    wanted = _per_prompt("return_logprob", body.return_logprob, count, False)
    tops = _per_prompt("top_logprobs_num", body.top_logprobs_num, count, 0)
    starts = _per_prompt("logprob_start_len", body.logprob_start_len, count, -1)
    scored = [start if w and start != -1 else None for w, start in zip(wanted, starts, strict=True)]
    if body.stream and scored.count(None) < count:
        raise InvalidRequestError(
            "`logprob_start_len`: log-probabilities of a prompt cannot be streamed; use -1",
            "logprob_start_len",
        )
    return [top if w else None for w, top in zip(wanted, tops, strict=True)], scored


@dataclass(slots=True)
class CumulativeAnswer:
    """One answer in SGLang's format, with all text and token ids so far."""

    request: TextRequest
    tokenizer: Tokenizer
    with_token_texts: bool = True  # in log-probabilities
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0

    def add(self, delta: TextDelta) -> dict[str, Any]:
        """Add a delta; return the answer so far, with the log-probabilities of this delta only.

        Log-probabilities take hundreds of bytes per token: all of them in every event would be quadratic.
        """
        self.text += delta.text
        self.output_ids += delta.token_ids
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        meta_info: dict[str, Any] = {
            "id": self.request.request_id,
            "finish_reason": _finish_reason(delta, len(self.output_ids)),
            "prompt_tokens": len(self.request.prompt_token_ids),
            "completion_tokens": len(self.output_ids),
            "cached_tokens": self.num_cached_tokens,
        }
        if delta.receipt is not None:
            meta_info["receipt"] = delta.receipt
        if self.request.params.logprobs is not None:
            pairs = zip(delta.token_ids, delta.logprobs, strict=True)
            meta_info["output_token_logprobs"] = [self.triple(i, lp.logprob) for i, lp in pairs]
            meta_info["output_top_logprobs"] = [
                [self.triple(i, logprob) for i, logprob in lp.top] for lp in delta.logprobs
            ]
        return {"text": self.text, "output_ids": self.output_ids, "meta_info": meta_info}

    def triple(self, token_id: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        return logprob, token_id, self.tokenizer.token_text(token_id) if self.with_token_texts else None


class CumulativeEvents:
    """The events of a stream in SGLang's format; implements `Events`. `answers`: one for each request."""

    done = DONE

    def __init__(self, answers: Sequence[CumulativeAnswer]) -> None:
        self._answers = answers
        self._submitted = [index for index, answer in enumerate(answers) if answer.request.generates]

    def first(self) -> bytes:
        """Return the events of the requests that generate no tokens."""
        rest = set(range(len(self._answers))).difference(self._submitted)
        return b"".join(self._event(index, EMPTY_ANSWER) for index in sorted(rest))

    def of(self, index: int, delta: TextDelta) -> bytes:
        return self._event(self._submitted[index], delta)

    def last(self) -> bytes:
        return b""

    def failed(self, error: Exception) -> bytes:
        return event(native_error(problem_of(error)))

    def _event(self, index: int, delta: TextDelta) -> bytes:
        return event({**self._answers[index].add(delta), "index": index})


def _prompt_answers(
    item: Item,
    several: Sequence[tuple[TextRequest, Sequence[TextDelta]]],
    scored: TextDelta | None,
    new_answer: Callable[[TextRequest], CumulativeAnswer],
    *,
    with_token_ids: bool,
) -> dict[str, Any]:
    """Format the answers to one prompt.

    `several`: requests with their answers. `scored`: the answer with the prompt's log-probabilities, if any.
    """
    answers = [(new_answer(request), delta) for request, deltas in several for delta in deltas]
    inputs = _input_logprobs(item, scored, answers[0][0])
    of_prompt = {name: encoded(value) for name, value in inputs.items()}
    responses = []
    for answer, delta in answers:
        whole = answer.add(delta)
        whole["meta_info"] |= of_prompt
        responses.append(encoded(whole))
    ids = {"input_ids": several[0][0].prompt_token_ids} if with_token_ids else {}
    return {"responses": responses, **ids}


def _finish_reason(delta: TextDelta, num_tokens: int) -> dict[str, Any] | None:
    match delta.finish_reason:
        case None:
            return None
        case FinishReason.STOP:
            matched = delta.stop_reason
            if matched is None and delta.token_ids:
                matched = delta.token_ids[-1]  # SGLang returns the end-of-sequence token id
            return {"type": "stop", "matched": matched}
        case FinishReason.LENGTH:
            return {"type": "length", "length": num_tokens}
        case reason:
            return {"type": reason.value, "message": str(delta.error or "the request was aborted")}


def _prompts(body: GenerateBody) -> tuple[Sequence[str | Sequence[int]], str]:
    """Return the prompts (all strings or all token ids) and the name of their field.

    Raises InvalidRequestError unless exactly one of `text` and `input_ids` is given and not empty.
    """
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequestError("give exactly one of `text` and `input_ids`", "text")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        if not texts:
            raise InvalidRequestError("`text` must hold at least one prompt", "text")
        return texts, "text"
    ids = body.input_ids or []
    if not ids:
        raise InvalidRequestError("`input_ids` must hold at least one token", "input_ids")
    # The union in the schema admits a list of ints or a list of lists, never a mixture.
    nested = [row for row in ids if isinstance(row, list)]
    return nested or [[i for i in ids if isinstance(i, int)]], "input_ids"


def _per_prompt(name: str, value: T | list[T] | None, count: int, default: T) -> list[T]:
    """Return one value per prompt, from a list of `count` values or from one value for all prompts.

    Raises InvalidRequestError for a list of another length.
    """
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise InvalidRequestError(f"`{name}` has {len(value)} entries for {count} prompts", name)
    return value


def _request_ids(rid: str | list[str] | None, count: int, request_id: str) -> list[str]:
    if rid is None:
        return [request_id] if count == 1 else [f"{request_id}-{i}" for i in range(count)]
    if isinstance(rid, str) and count > 1:
        raise InvalidRequestError(f"`rid` must be a list of {count} for a batch of {count}", "rid")
    rids = _per_prompt("rid", rid, count, request_id)
    if not all(0 < len(each) <= MAX_ID_CHARS for each in rids):
        raise InvalidRequestError(f"`rid`: an id has 1 to {MAX_ID_CHARS} characters", "rid")
    if len(set(rids)) < count:
        raise InvalidRequestError("`rid`: two requests have the same id", "rid")
    return rids


def _num_beams(body: SamplingBody, model: ServedModel) -> int:
    """Return the number of beams. Raises InvalidRequestError for too many or for incompatible fields."""
    name = PREFIX + "num_beams"
    num_beams = 1 if body.num_beams is None else body.num_beams
    with params_named({"num_beams": name}):
        check_num_beams(num_beams, model.exported_top_k)
    if num_beams == 1:
        return 1
    changing = [each for each in PARAMS.values() if each.changes_logits]
    changes = [("stop", bool(body.stop))]
    changes += [
        (each.name, getattr(body, each.name) not in (None, each.default, [], {})) for each in changing
    ]
    changes += [("n", (body.n or 1) > 1), ("best_of", (body.best_of or 1) > 1)]
    for other, given in changes:
        if given:
            raise InvalidRequestError(
                f"`{PREFIX}{other}` cannot be combined with {num_beams} beams;"
                f" leave it out or set `{name}` to 1",
                PREFIX + other,
            )
    return num_beams


def _refuse_streamed_beams(requests: Sequence[TextRequest]) -> None:
    if any(request.num_beams > 1 for request in requests):
        raise InvalidRequestError(
            f"beams cannot be streamed; leave out `stream` or set `{PREFIX}num_beams` to 1", "stream"
        )


@router.post("/abort", responses=ABORTED)
@router.post("/abort_request", responses=ABORTED)
async def abort(body: AbortBody, request: Request) -> Response:
    """Ends the requests with these ids; unknown ids, also of finished requests, are ignored."""
    service = service_of(request)
    caller = caller_of(request)
    tenant = None if caller.is_admin else caller.tenant or None
    rids = [body.rid] if isinstance(body.rid, str) else body.rid
    command = AbortRequests(tuple(map(_without_prefix, rids)), tenant)
    return JsonResponse({"aborted": await count_everywhere(command, service)})


def _without_prefix(rid: str) -> str:
    for prefix in (ChatShape.id_prefix, CompletionShape.id_prefix, MESSAGE_ID_PREFIX):
        rid = rid.removeprefix(prefix)
    return rid
