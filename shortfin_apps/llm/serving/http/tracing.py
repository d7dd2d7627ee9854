"""Tracing: an OpenTelemetry span per HTTP request, with child spans of the work done for it.

Imported only if traces are enabled, as OpenTelemetry is an extra. Spans are created in the event loop after
the request has ended, from its timers. Spans never hold text of prompts or answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.propagate import extract
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shortfin_apps.llm.components.request.messages import ComputedTask, FinishReason
from shortfin_apps.llm.serving.frontend.metrics import RequestTimer
from shortfin_apps.llm.serving.frontend.text_generation import current_is_traced
from shortfin_apps.llm.serving.frontend.text_stream import PendingAnswer, TextRequest
from shortfin_apps.llm.serving.http.access_log import PROBES, SERVER_FAILED, AccessEntry, route_of

METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class TracingMiddleware:
    """Traces sampled requests, except probes; wraps AccessLogMiddleware.

    The `traceparent` header names the parent span. `clock` (seconds) is the metrics' and timers' clock.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer, model_name: str, clock: Callable[[], float]) -> None:
        self._app = app
        self._tracer = tracer
        self._model_name = model_name
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_of(scope) in PROBES:
            await self._app(scope, receive, send)
            return
        epoch_s = time.time() - self._clock()
        span = self._start(scope)
        if not span.is_recording():
            await self._app(scope, receive, send)
            return
        current_is_traced.set(True)
        sending_s: float | None = None

        async def send_and_note_start(message: Message) -> None:
            nonlocal sending_s
            if message["type"] == "http.response.start":
                sending_s = self._clock()
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_start)
        except BaseException as error:
            span.set_attribute("error.type", type(error).__qualname__)
            span.set_status(StatusCode.ERROR)
            raise
        finally:
            current_is_traced.set(False)
            self._end(span, scope, sending_s, epoch_s)

    def _start(self, scope: Scope) -> Span:
        method: str = scope["method"]
        known = method in METHODS
        attributes: dict[str, AttributeValue] = {
            "http.request.method": method if known else "_OTHER",
            "url.path": route_of(scope),  # not yet matched to a route
            "url.scheme": scope.get("scheme", "http"),
            "shortfin_llm.request_id": scope["state"]["request_id"],
        }
        parent = extract(Headers(scope=scope))
        return self._tracer.start_span(
            method if known else "HTTP", parent, SpanKind.SERVER, attributes=attributes
        )

    def _end(self, span: Span, scope: Scope, sending_s: float | None, epoch_s: float) -> None:
        ended_s = self._clock()
        access: AccessEntry | None = scope["state"].get("access")
        if access is not None:
            self._describe(span, scope, access)
            context = set_span_in_context(span, Context())
            for answer in access.pending:
                SequenceSpans(self._tracer, context, epoch_s).record(answer, ended_s)
            if sending_s is not None and access.requests:
                started = self._tracer.start_span("send", context, start_time=_ns(epoch_s + sending_s))
                started.end(_ns(epoch_s + ended_s))
        span.end(_ns(epoch_s + ended_s))

    def _describe(self, span: Span, scope: Scope, access: AccessEntry) -> None:
        if (route := getattr(scope.get("route"), "path", "")) and scope["method"] in METHODS:
            span.update_name(f"{scope['method']} {route}")
            span.set_attribute("http.route", route)
        if access.status is not None:
            span.set_attribute("http.response.status_code", access.status)
        if access.error is not None:
            span.set_attribute("error.type", access.error)
        began_well = access.status is not None and access.status < 400
        if (access.status or SERVER_FAILED) >= SERVER_FAILED or (began_well and access.error is not None):
            span.set_status(Status(StatusCode.ERROR, access.error))
        if access.requests:
            span.set_attributes(self._gen_ai(access.requests[0], access))

    def _gen_ai(self, request: TextRequest, access: AccessEntry) -> dict[str, AttributeValue]:
        """Return OpenTelemetry's generative AI attributes of a request and all its sequences."""
        measured, params = access.measurements(), request.params
        reasons = [answer.timer.finish_reason for answer in access.pending]
        optional: dict[str, AttributeValue | None] = {
            "gen_ai.usage.input_tokens": measured["tokens_in"],
            "gen_ai.usage.cache_read.input_tokens": measured["tokens_cached"],
            "gen_ai.usage.output_tokens": measured["tokens_out"],
            "gen_ai.request.seed": params.seed,
        }
        return {
            "gen_ai.operation.name": "text_completion" if request.conversation is None else "chat",
            "gen_ai.provider.name": "shortfin_llm",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.choice.count": len(access.requests),
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.response.finish_reasons": [reason.value for reason in reasons if reason is not None],
            **{name: value for name, value in optional.items() if value is not None},
        }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


class SequenceSpans:
    """Records spans under `parent`. `epoch_s`: the zero of the timers' clock, in seconds since the epoch."""

    def __init__(self, tracer: Tracer, parent: Context, epoch_s: float) -> None:
        self._tracer = tracer
        self._parent = parent
        self._epoch_s = epoch_s

    def record(self, answer: PendingAnswer, now_s: float) -> None:
        """Record all spans of a sequence that has ended, or ends now."""
        timer = answer.timer
        ended_s = now_s if timer.ended_s is None else timer.ended_s
        num_prompt = len(answer.request.prompt_token_ids)
        attributes: dict[str, AttributeValue] = {
            "shortfin_llm.choice": answer.request.choice,
            "gen_ai.usage.input_tokens": num_prompt,
            "gen_ai.usage.cache_read.input_tokens": timer.cached_tokens,
            "gen_ai.usage.output_tokens": timer.num_tokens,
        }
        if timer.finish_reason is not None:
            attributes["gen_ai.response.finish_reasons"] = [timer.finish_reason.value]
        sequence = self._start("generate", timer.arrival_s, attributes)
        if timer.finish_reason is FinishReason.ERROR:
            sequence.set_status(Status(StatusCode.ERROR))
        below = SequenceSpans(self._tracer, set_span_in_context(sequence, Context()), self._epoch_s)
        below._record_parts(timer, num_prompt, ended_s)
        sequence.end(self._ns(ended_s))

    def _record_parts(self, timer: RequestTimer, num_prompt: int, ended_s: float) -> None:
        computed = timer.computed or []
        if computed or timer.first_s is None:  # false for a beam search: its steps record no tasks
            self._span("queue", timer.arrival_s, computed[0].began_s if computed else ended_s)
        first, later = _split(computed, num_prompt)
        again = [task for task in later if _is_prefill(task, num_prompt)]
        for task in first:
            self._prefill(task, is_again=False)
        for task in again:
            self._prefill(task, is_again=True)
        if timer.first_s is None:
            return
        if timer.num_tokens > 1:
            self._decode(timer, first, later, again, num_prompt)
        busy = {"shortfin_llm.detokenize.seconds": timer.detokenise_s}
        self._span("detokenize", timer.first_s, ended_s, busy)

    def _prefill(self, task: ComputedTask, *, is_again: bool) -> None:
        attributes: dict[str, AttributeValue] = {
            "shortfin_llm.start_position": task.start_position,
            "shortfin_llm.tokens": task.num_tokens,
            "shortfin_llm.entry_family": task.entry_family,
            "shortfin_llm.batch_tasks": task.batch_tasks,
            "shortfin_llm.device.seconds": task.device_after_s - task.device_before_s,
            "shortfin_llm.after_preemption": is_again,
        }
        self._span("prefill", task.began_s, task.ended_s, attributes)

    def _decode(
        self,
        timer: RequestTimer,
        first: Sequence[ComputedTask],
        later: Sequence[ComputedTask],
        again: Sequence[ComputedTask],
        num_prompt: int,
    ) -> None:
        """Record one span from the first to the last token, using the engine's times where available."""
        assert timer.first_s is not None
        began_s = first[-1].ended_s if first else timer.first_s
        last = later[-1] if later else None
        attributes: dict[str, AttributeValue] = {"shortfin_llm.tokens": timer.num_tokens - 1}
        ended_s = timer.last_s
        if last is not None and last.start_position + 1 == num_prompt + timer.num_tokens - 1:
            ended_s = last.ended_s
            attributes["shortfin_llm.device.seconds"] = last.device_after_s - later[0].device_before_s
        if later:
            attributes["shortfin_llm.entry_family"] = sorted({task.entry_family for task in later})
            attributes["shortfin_llm.batch_tasks"] = max(task.batch_tasks for task in later)
        span = self._start("decode", began_s, attributes)
        span.add_event("first token", timestamp=self._ns(began_s))
        for task in again:
            if task.start_position == min(each.start_position for each in again):
                span.add_event("computed again after a preemption", timestamp=self._ns(task.began_s))
        span.end(self._ns(max(began_s, ended_s)))

    def _span(
        self,
        name: str,
        began_s: float,
        ended_s: float,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        span = self._start(name, began_s, attributes or {})
        span.end(self._ns(max(began_s, ended_s)))

    def _start(self, name: str, began_s: float, attributes: Mapping[str, AttributeValue]) -> Span:
        return self._tracer.start_span(
            name, self._parent, attributes=attributes, start_time=self._ns(began_s)
        )

    def _ns(self, seconds: float) -> int:
        return int((self._epoch_s + seconds) * 1e9)


def _split(
    computed: Sequence[ComputedTask], num_prompt: int
) -> tuple[Sequence[ComputedTask], Sequence[ComputedTask]]:
    """Return the tasks up to the one that produced the first token, and the later tasks."""
    for index, task in enumerate(computed, 1):
        if task.start_position + task.num_tokens >= num_prompt:
            return computed[:index], computed[index:]
    return computed, ()


def _is_prefill(task: ComputedTask, num_prompt: int) -> bool:
    return task.num_tokens > 1 or task.start_position < num_prompt
