"""Tracing: an OpenTelemetry span per HTTP request, with child spans of the work done for it.

Imported only if traces are enabled, as OpenTelemetry is an extra. Spans are created in the event loop after
the request has ended, from its timers. They never hold text of prompts or answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.propagate import extract
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shortfin_apps.llm.serving.frontend.text_generation import current_is_traced
from shortfin_apps.llm.serving.frontend.text_stream import TextRequest
from shortfin_apps.llm.serving.http.access_log import PROBES, SERVER_FAILED, AccessEntry, route_of
from shortfin_apps.llm.serving.http.sequence_spans import SequenceSpans

METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class TracingMiddleware:
    """Traces sampled requests, except probes; wraps AccessLogMiddleware.

    The `traceparent` header names the parent span. `clock` (seconds) is that of the metrics and the timers.
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
