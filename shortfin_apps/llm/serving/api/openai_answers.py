"""Answers of `/v1/completions` and `/v1/chat/completions`, complete or as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.generation import Choices, submitted
from shortfin_apps.llm.serving.api.openai_shapes import Extras, Shape, usage
from shortfin_apps.llm.serving.api.schema import OpenAIBody, StreamOptions
from shortfin_apps.llm.serving.api.service import request_id_of, service_of
from shortfin_apps.llm.serving.frontend.prompt_scoring import (
    PromptLogprobs,
    prompt_logprobs,
    scoring_request,
)
from shortfin_apps.llm.serving.frontend.text_stream import EMPTY_ANSWER, TextDelta, TextRequest, gather
from shortfin_apps.llm.serving.frontend.text_workers import TextWorkers
from shortfin_apps.llm.serving.http.errors import openai_shape, problem_of
from shortfin_apps.llm.serving.http.json_response import JsonResponse, encoded, made, num_logprobs, work_of
from shortfin_apps.llm.serving.http.streaming import DONE, EventStream, event, json_line, unless_disconnected

_MARK = "\0"  # placeholder for a chunk's text, see `_frame`


def extras_of(body: OpenAIBody, request: Request, echoed_logprobs: int | None = None) -> Extras:
    """Read the optional fields of answers. Raises InvalidRequestError.

    Prompt log-probabilities cannot be streamed. `echoed_logprobs`: see Extras.
    """
    service_of(request).limits.check_logprobs(body.prompt_logprobs, "prompt_logprobs")
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


def _scorings(requests: Sequence[TextRequest], extras: Extras) -> list[TextRequest | None]:
    """Return for each request the request that scores its prompt; choices of one prompt share one object.

    Returns an empty list if no prompt log-probabilities are requested.
    """
    if extras.scored is None:
        return []
    scorings: list[TextRequest | None] = []
    for request in requests:
        is_new = request.choice == 0
        scorings.append(scoring_request(request, extras.scored) if is_new else scorings[-1])
    return scorings


async def respond(
    request: Request,
    body: OpenAIBody,
    requests: Sequence[TextRequest],
    shape: Shape,
    extras: Extras,
    choices: Choices | None = None,
) -> Response:
    """Submit the requests and return their answers, complete or streamed.

    `choices`: how many of the answers to return; None: all.
    """
    service, generator = service_of(request), service_of(request).model.generator
    returned = requests if choices is None else choices.of_returned(requests)
    scorings = _scorings(returned, extras)
    distinct = list({id(each): each for each in scorings if each is not None}.values())
    streams = await submitted(requests, request, distinct)
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
    of_scoring = dict(zip(map(id, distinct), answers[len(answers) - len(distinct) :], strict=True))
    scores = [
        prompt_logprobs(each.prompt_token_ids, of_scoring.get(id(scoring)))
        for each, scoring in zip(returned, scorings, strict=False)
    ]
    known = answers[: len(answers) - len(distinct)] or [EMPTY_ANSWER] * len(requests)
    totals = usage(requests, [len(a.token_ids) for a in known], [a.num_cached_tokens for a in known])
    picked = choices.pick(known) if choices else known
    whole = await _whole(shape, head | {"usage": totals}, scores, picked, generator.workers)
    return JsonResponse(whole)


async def _whole(
    shape: Shape,
    head: dict[str, Any],
    scores: Sequence[PromptLogprobs],
    answers: Sequence[TextDelta],
    workers: TextWorkers,
) -> dict[str, Any]:
    """Return the complete answer. Each choice is encoded separately, in a worker thread if it is large."""
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


class ChunkEvents:
    """The chunks of a stream in the format `shape`; implements `Events`.

    `with_usage`: a last chunk has the usage. `with_running_usage`: each chunk has the usage of its choice so
    far, as in vLLM. For speed, fields outside of `choices` are encoded once for all chunks; in chunks with
    only text, everything but the text is.
    """

    done = DONE

    def __init__(
        self,
        shape: Shape,
        head: dict[str, Any],
        requests: Sequence[TextRequest],
        *,
        with_usage: bool,
        with_running_usage: bool = False,
    ) -> None:
        self._shape = shape
        self._requests = requests
        self._with_usage, self._with_running_usage = with_usage, with_running_usage
        self._head = {**head, "object": shape.chunk_object_name, **shape.head([])}
        if with_usage:
            self._head["usage"] = None
        self._opening = _opening(self._head)
        self._frames: list[tuple[bytes, bytes] | None] = [None] * len(requests)  # bytes around a chunk's text
        self._generated, self._cached = [0] * len(requests), [0] * len(requests)

    def first(self) -> bytes:
        """Return the chunks of requests that generate no tokens."""
        empty = [index for index, request in enumerate(self._requests) if not request.generates]
        return b"".join(self._chunks(index, EMPTY_ANSWER) for index in empty)

    def of(self, index: int, delta: TextDelta) -> bytes:
        self._generated[index] += len(delta.token_ids)
        if delta.num_cached_tokens > self._cached[index]:
            self._cached[index] = delta.num_cached_tokens
        frame = self._frames[index]
        if frame is not None and not delta.logprobs and delta.finish_reason is None:
            return frame[0] + json_line(delta.text) + frame[1] if delta.text else b""
        chunks = self._chunks(index, delta)
        if frame is None:
            self._frames[index] = self._frame(index)
        return chunks

    def last(self) -> bytes:
        if not self._with_usage:
            return b""
        totals = usage(self._requests, self._generated, self._cached)
        return event({**self._head, "choices": [], "usage": totals})

    def failed(self, error: Exception) -> bytes:
        return event(openai_shape(problem_of(error)))

    def _chunks(self, index: int, delta: TextDelta) -> bytes:
        if self._with_running_usage:
            self._set_usage(index)
        return b"".join(map(self._chunk, self._shape.chunks(index, delta)))

    def _set_usage(self, index: int) -> None:
        request = replace(self._requests[index], choice=0)  # `usage` counts the prompt of choice 0 only
        self._head["usage"] = usage([request], [self._generated[index]], [self._cached[index]])
        self._opening = _opening(self._head)

    def _frame(self, index: int) -> tuple[bytes, bytes] | None:
        """Return the bytes before and after the text of a text-only chunk; None if they are not constant."""
        if self._with_running_usage or "prompt_token_ids" in self._head:
            return None
        if (choice := self._shape.plain_chunk(index, _MARK)) is None:
            return None
        before, _, after = self._chunk(choice).rpartition(json_line(_MARK))
        return before, after

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = self._opening + json_line(choice) + b"]}\n\n"
        if self._head.pop("prompt_token_ids", None) is not None:  # only in the first chunk
            self._opening = _opening(self._head)
        return chunk


def _opening(head: dict[str, Any]) -> bytes:
    """Encode a chunk's event up to its only choice."""
    return b"data: " + json_line(head)[:-1] + b',"choices":['
