"""`POST|PUT /generate`: upstream shortfin's answer format, with SGLang's request fields and stream format.

Complete: {"responses": [{"prompt", "responses": [{"text", "output_ids", "meta_info"}, ...]}, ...]}
          with `n` answers to each prompt, or `num_beams` answers, best first
Streamed: data: {"text", "output_ids", "meta_info", "index"}, cumulative, then data: [DONE];
          log-probabilities are not cumulative: an event has its new tokens' only
"""

from __future__ import annotations

import asyncio
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
from shortfin_apps.llm.serving.api.answers import GenerateAnswer, NativeErrorAnswer, errors, whole_or_streamed
from shortfin_apps.llm.serving.api.best_of import Choices, choices_of
from shortfin_apps.llm.serving.api.generation import GenerateRequest, engine_requests
from shortfin_apps.llm.serving.api.json_body import JsonRoute, check_fields
from shortfin_apps.llm.serving.api.limits import Limits
from shortfin_apps.llm.serving.api.sampling import NamedTokens, first_given, params_named
from shortfin_apps.llm.serving.api.schema import GenerateBody, SamplingBody
from shortfin_apps.llm.serving.api.service import ServedModel, request_id_of, service_of
from shortfin_apps.llm.serving.api.structured_output import AskedGrammar, asked_grammar
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
from shortfin_apps.llm.serving.http.access_log import access_of
from shortfin_apps.llm.serving.http.errors import Problem, problem_of, register_shape
from shortfin_apps.llm.serving.http.json_response import JsonResponse
from shortfin_apps.llm.serving.http.logprobs_work import encoded, made, num_logprobs
from shortfin_apps.llm.serving.http.streaming import DONE, EventStream, event, unless_disconnected
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute, tags=["native"])

DEFAULT_MAX_TOKENS = 50  # upstream's
MAX_ID_CHARS = 128
PREFIX = "sampling_params."
NAMES = {name: PREFIX + name for name in PARAMS}
# Parameters that the engine may refuse for this model: their names in the engine and in a body.
REFUSED_BY_ENGINE = {
    **{name: PREFIX + name for name in ("num_beams", "stop", "stop_token_ids")},
    **{each.name: PREFIX + each.name for each in PARAMS.values() if each.changes_logits},
    "prompt_logprobs": "logprob_start_len",
}
ANSWERS = whole_or_streamed(GenerateAnswer) | errors(NativeErrorAnswer)

T = TypeVar("T")


def native_error(problem: Problem) -> dict[str, Any]:
    """Upstream shortfin's shape."""
    return {"error": problem.message, "code": problem.code or "INVALID_REQUEST_ARGS", **problem.extra}


register_shape("/generate", native_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt of the batch."""

    text: str | None
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingBody
    tokens: NamedTokens
    choices: Choices
    grammar: AskedGrammar | None
    request_id: str
    logprobs: int | None
    logprob_start: int | None  # first prompt token to score


@router.post("/generate", responses=ANSWERS)
@router.put("/generate", responses=ANSWERS)
async def generate(body: GenerateBody, request: Request) -> Response:
    """Continues one prompt or a batch of them."""
    model = service_of(request).model
    items = await read_items(body, request)
    by_item = [await engine_requests(wanted_of(item, body, model), request) for item in items]
    requests = list(chain.from_iterable(by_item))
    new_answer = partial(
        CumulativeAnswer,
        tokenizer=model.generator.tokenizer,
        with_token_texts=body.return_text_in_logprobs is not False,
    )
    access = access_of(request)
    access.requests = requests
    generating = [text_request for text_request in requests if text_request.generates]
    if body.stream:
        _refuse_streamed_beams(requests)
        with params_named(REFUSED_BY_ENGINE):
            access.pending = streams = await model.generator.submit(generating)
        return EventStream(request, CumulativeEvents(list(map(new_answer, requests))), streams)
    scorings = [_scoring(item, first) for item, (first, *_) in zip(items, by_item, strict=True)]
    with params_named(REFUSED_BY_ENGINE):
        pending = await model.generator.submit_whole([*generating, *filter(None, scorings)])
    access.pending = pending[: len(generating)]
    results = iter(await unless_disconnected(request, gather_answers(pending)))
    known = [next(results) if each.generates else [EMPTY_ANSWER] * each.num_beams for each in requests]
    returned = _returned(items, by_item, known)
    responses = []
    for item, scoring in zip(items, scorings, strict=True):
        several = list(islice(returned, item.sampling.n or 1))
        scored = None if scoring is None else next(results)[0]
        count = sum(num_logprobs(delta.logprobs) for _, deltas in several for delta in deltas)
        count += num_logprobs(scored.logprobs) if scored else 0
        make = partial(_prompt_answers, item, several, scored, with_token_ids=bool(body.return_input_ids))
        responses.append(await made(model.generator.workers, count, make, new_answer))
    return JsonResponse({"responses": responses})


def _returned(
    items: Sequence[Item], by_item: Sequence[Sequence[TextRequest]], known: Sequence[list[TextDelta]]
) -> Iterator[tuple[TextRequest, list[TextDelta]]]:
    """Yield the answers to send, with their requests. `known` holds each request's answers."""
    rest = iter(known)
    for item, requests in zip(items, by_item, strict=True):
        several = [next(rest) for _ in requests]
        if item.choices.are_ranked:  # then there are no beams
            answers = [answer for [answer] in several]
            several = [[each] for each in item.choices.pick(answers)]
        yield from zip(item.choices.of_returned(requests), several, strict=True)


def _scoring(item: Item, first: TextRequest) -> TextRequest | None:
    """Return the request that scores the item's prompt, if log-probabilities of the prompt are requested."""
    if item.logprob_start is None or item.logprobs is None:
        return None
    return scoring_request(first, item.logprobs, item.logprob_start)


def _input_logprobs(item: Item, answer: TextDelta | None, shape: CumulativeAnswer) -> dict[str, Any]:
    """Return SGLang's fields for the prompt tokens from `logprob_start_len` on."""
    if item.logprob_start is None:
        return {}
    scores: PromptLogprobs = prompt_logprobs(item.prompt_token_ids, answer, item.logprob_start)
    scored = list(zip(item.prompt_token_ids[item.logprob_start :], scores, strict=True))
    return {
        "input_token_logprobs": [shape.triple(i, None if lp is None else lp.logprob) for i, lp in scored],
        "input_top_logprobs": [
            None if lp is None else [shape.triple(i, logprob) for i, logprob in lp.top] for _, lp in scored
        ],
    }


async def read_items(body: GenerateBody, request: Request) -> list[Item]:
    """Return the prompts of a body, each with its parameters. Raises InvalidRequestError."""
    service, generator = service_of(request), service_of(request).model.generator
    check_fields(body, request)
    texts, token_id_lists = _prompts(body)
    service.limits.check_prompts(texts or token_id_lists, "text" if texts else "input_ids")
    count = len(texts or token_id_lists)
    sampling = _per_prompt("sampling_params", body.sampling_params, count, SamplingBody())
    for params in sampling:
        service.limits.check_choices(params.n, params.stop, PREFIX, params.best_of)
    logprobs, starts = _logprobs(body, count, service.limits)
    choices = [
        choices_of(params, wanted, stream=body.stream, prefix=PREFIX)
        for params, wanted in zip(sampling, logprobs, strict=True)
    ]
    given = {id(params): params for params in sampling}
    words = [word for each in given.values() for word in each.bad_words or ()]
    service.limits.check_bad_words(words, PREFIX)
    name = "best_of" if any(each.are_ranked for each in choices) else "n"
    generator.check_count(sum(each.generated for each in choices), PREFIX + name)
    rids = _request_ids(body.rid, count, request_id_of(request))
    with params_named(NAMES):
        tokens = {key: NamedTokens.of(each, generator.tokenizer.vocab_size) for key, each in given.items()}
    items = []
    for i in range(count):
        prompt_token_ids = (
            await generator.encode(texts[i], param="text") if texts else tuple(token_id_lists[i])
        )
        await asyncio.sleep(0)  # lets other requests run during a large batch
        items.append(
            Item(
                text=texts[i] if texts else None,
                prompt_token_ids=prompt_token_ids,
                sampling=sampling[i],
                tokens=tokens[id(sampling[i])],
                choices=choices[i],
                grammar=asked_grammar(sampling[i], PREFIX),
                request_id=rids[i],
                logprobs=logprobs[i],
                logprob_start=_checked_start(starts[i], prompt_token_ids),
            )
        )
    return items


def wanted_of(item: Item, body: GenerateBody, model: ServedModel) -> GenerateRequest:
    """Return what is asked for the item. Raises InvalidRequestError for what no beam search does."""
    num_beams = _num_beams(item.sampling, model)
    if num_beams > 1 and item.grammar is not None:
        raise InvalidRequestError(
            f"structured output cannot be combined with {num_beams} beams; set `{PREFIX}num_beams` to 1",
            PREFIX + "num_beams",
        )
    names = ("max_completion_tokens", "max_new_tokens", "max_tokens")
    max_tokens_field, max_tokens = first_given(item.sampling, *names, prefix=PREFIX)
    return GenerateRequest(
        prompt_token_ids=item.prompt_token_ids,
        sampling=item.sampling,
        serving=body,
        defaults=model.native_defaults,
        tokens=item.tokens,
        prefix=PREFIX,
        prompt_field="text" if item.text is not None else "input_ids",
        max_tokens=max_tokens,
        max_tokens_field=PREFIX + max_tokens_field,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        may_be_empty=True,
        num_answers=item.choices.generated,
        logprobs=item.choices.computed_logprobs,
        logprobs_field="top_logprobs_num",
        grammar=item.grammar,
        include_stop=item.sampling.no_stop_trim,
        num_beams=num_beams,
        request_id=item.request_id,
    )


def _logprobs(body: GenerateBody, count: int, limits: Limits) -> tuple[list[int | None], list[int | None]]:
    """Return two lists with an entry per prompt.

    The first has the number of top log-probabilities to return, None for no log-probabilities at all. The
    second has the first prompt token to score, None to score no prompt tokens.
    """
    wanted = _per_prompt("return_logprob", body.return_logprob, count, False)
    tops = _per_prompt("top_logprobs_num", body.top_logprobs_num, count, 0)
    for top in tops:
        limits.check_logprobs(top, "top_logprobs_num")
    starts = _per_prompt("logprob_start_len", body.logprob_start_len, count, -1)
    scored = [start if w and start != -1 else None for w, start in zip(wanted, starts, strict=True)]
    if body.stream and scored.count(None) < count:
        raise InvalidRequestError(
            "`logprob_start_len`: log-probabilities of a prompt cannot be streamed; use -1",
            "logprob_start_len",
        )
    return [top if w else None for w, top in zip(wanted, tops, strict=True)], scored


def _checked_start(start: int | None, prompt_token_ids: Sequence[int]) -> int | None:
    if start is not None and not 0 <= start < max(1, len(prompt_token_ids)):
        raise InvalidRequestError(
            f"`logprob_start_len` must be -1 or lie in [0, {len(prompt_token_ids)})", "logprob_start_len"
        )
    return start


@dataclass(slots=True)
class CumulativeAnswer:
    """One completion in SGLang's format, with all text and token ids so far."""

    request: TextRequest
    tokenizer: Tokenizer
    with_token_texts: bool = True  # in log-probabilities
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0

    def add(self, delta: TextDelta) -> dict[str, Any]:
        """Add a delta and return the answer so far, but only this delta's log-probabilities.

        They take hundreds of bytes a token: sending all of them in every event would be quadratic.
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
    """The events of a stream in SGLang's format; implements `Events`. `answers` has one per request."""

    done = DONE

    def __init__(self, answers: Sequence[CumulativeAnswer]) -> None:
        self._answers = answers
        self._submitted = [index for index, answer in enumerate(answers) if answer.request.generates]

    def first(self) -> bytes:
        """Return the answers of requests that generate no tokens."""
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
    """Format the answers to one prompt. `scored` has the prompt's own log-probabilities."""
    answers = [(new_answer(request), delta) for request, deltas in several for delta in deltas]
    inputs = _input_logprobs(item, scored, answers[0][0])
    of_prompt = {name: encoded(value) for name, value in inputs.items()}
    responses = []
    for answer, delta in answers:
        whole = answer.add(delta)
        whole["meta_info"] |= of_prompt
        responses.append(encoded(whole))
    ids = {"input_ids": item.prompt_token_ids} if with_token_ids else {}
    return {"prompt": item.text, "responses": responses, **ids}


def _finish_reason(delta: TextDelta, num_tokens: int) -> dict[str, Any] | None:
    match delta.finish_reason:
        case None:
            return None
        case FinishReason.STOP:
            matched = delta.stop_reason
            if matched is None and delta.token_ids:
                matched = delta.token_ids[-1]  # SGLang names the end-of-sequence token
            return {"type": "stop", "matched": matched}
        case FinishReason.LENGTH:
            return {"type": "length", "length": num_tokens}
        case reason:
            return {"type": reason.value, "message": str(delta.error or "the request was aborted")}


def _prompts(body: GenerateBody) -> tuple[list[str], list[list[int]]]:
    """Return the batch as texts or as token ids: exactly one of the two lists is not empty."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequestError("give exactly one of `text` and `input_ids`", "text")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        if not texts:
            raise InvalidRequestError("`text` must hold at least one prompt", "text")
        return texts, []
    ids = body.input_ids or []
    if not ids:
        raise InvalidRequestError("`input_ids` must hold at least one token", "input_ids")
    # The union in the schema admits a list of ints or a list of lists, never a mixture.
    nested = [row for row in ids if isinstance(row, list)]
    return [], nested or [[i for i in ids if isinstance(i, int)]]


def _per_prompt(name: str, value: T | list[T] | None, count: int, default: T) -> list[T]:
    """Return one value per prompt, from a list or from a single value for all."""
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
