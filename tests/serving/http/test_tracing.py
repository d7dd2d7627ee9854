from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from shortfin_apps.llm.components.request.messages import Delta, GenerateCall
from shortfin_apps.llm.contract.errors import InvocationError
from tests.serving.api.harness import CHAT, COMPLETIONS, MESSAGES, NATIVE, Harness
from tests.serving.api.scripted_engine import Script, failing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """A harness with the SDK's own exporter to memory."""

    def __init__(self, script: Script | None = None, sampler: Sampler | None = None, **options: Any) -> None:
        self.memory = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.harness = Harness(script, traces=provider, **options)

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> int:
        answer = await self.harness.client.post(path, json=body, headers=headers)
        return answer.status_code

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self.memory.get_finished_spans()

    @property
    def root(self) -> ReadableSpan:
        [root] = [span for span in self.spans if span.kind is SpanKind.SERVER]
        return root

    def names_below(self, parent: ReadableSpan) -> list[str]:
        parents = parent.context
        return [
            span.name
            for span in self.spans
            if span.parent is not None and span.parent.span_id == parents.span_id
        ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        (NATIVE, {"text": "the end"}, "text_completion"),
        (COMPLETIONS, {"prompt": "the end"}, "text_completion"),
        (CHAT, {"messages": MESSAGES}, "chat"),
    ],
)
async def test_a_request_is_a_span_by_the_conventions_for_generative_ai(
    path: str, body: dict[str, Any], operation: str, stream: bool
) -> None:
    traced = Traced()
    assert await traced.post(path, {**body, "stream": stream}, **{"x-request-id": "mine-1"}) == 200
    root = traced.root
    attributes = dict(root.attributes or {})
    assert root.name == f"POST {path}"
    assert root.status.status_code is StatusCode.UNSET
    assert attributes["http.response.status_code"] == 200
    assert attributes["shortfin_llm.request_id"] == "mine-1"
    assert attributes["gen_ai.operation.name"] == operation
    assert attributes["gen_ai.request.model"] == "tiny"
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 3
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    assert {name for name in attributes if name.startswith("gen_ai.")} <= known
    assert traced.names_below(root) == ["generate", "send"]


async def test_the_traceparent_is_the_parent_and_a_request_without_begins_a_trace() -> None:
    traced = Traced()
    await traced.post(COMPLETIONS, {"prompt": "a"}, traceparent=PARENT)
    root = traced.root
    assert root.parent is not None
    assert f"{root.parent.trace_id:032x}-{root.parent.span_id:016x}" in PARENT
    assert {span.context.trace_id for span in traced.spans} == {root.parent.trace_id}
    other = Traced()
    await other.post(COMPLETIONS, {"prompt": "a"}, traceparent="00-nonsense")
    assert other.root.parent is None


async def test_the_sampler_decides_and_what_it_leaves_out_costs_the_engine_nothing() -> None:
    traced = Traced(sampler=ParentBased(ALWAYS_OFF))
    assert await traced.post(COMPLETIONS, {"prompt": "a"}) == 200
    assert not traced.spans
    assert await traced.post(COMPLETIONS, {"prompt": "a"}, traceparent=PARENT) == 200
    assert traced.root.name == "POST /v1/completions"
    assert [call.is_traced for call in traced.harness.engine.calls] == [False, True]


async def test_each_choice_has_spans_of_its_own() -> None:
    traced = Traced()
    assert await traced.post(COMPLETIONS, {"prompt": "a", "n": 3}) == 200
    assert traced.names_below(traced.root) == ["generate"] * 3 + ["send"]


async def test_probes_are_not_traced_and_paths_of_no_route_do_not_name_spans() -> None:
    traced = Traced(root_path="/llm")
    for path in ("/health", "/ready", "/metrics", "/llm/health"):
        await traced.harness.client.get(path)
    assert not traced.spans
    assert (await traced.harness.client.get("/secret/1?key=2")).status_code == 404
    assert traced.root.name == "GET"
    assert "key" not in str(traced.root.attributes)


async def test_refusals_are_told_by_their_code_and_failures_are_errors() -> None:
    traced = Traced()
    assert await traced.post(COMPLETIONS, {"prompt": "a", "max_tokens": -1}) == 400
    assert (traced.root.attributes or {})["error.type"] == "INVALID_REQUEST_ARGS"
    assert traced.root.status.status_code is StatusCode.UNSET, "the client's fault"
    for stream in (False, True):
        broken = Traced(failing(InvocationError("the device is unwell")))
        await broken.post(COMPLETIONS, {"prompt": "a", "stream": stream})
        assert broken.root.status.status_code is StatusCode.ERROR


async def test_a_bug_in_a_route_ends_the_span_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    def broken(call: GenerateCall) -> Iterator[Delta]:
        raise ZeroDivisionError

    caplog.set_level(logging.CRITICAL)
    traced = Traced(broken)
    assert await traced.post(COMPLETIONS, {"prompt": "a"}) == 500
    assert traced.root.status.status_code is StatusCode.ERROR


async def test_no_span_holds_text() -> None:
    traced = Traced()
    body = {"messages": [{"role": "user", "content": "xyzzy"}], "stop": ["plugh"], "user": "frobozz"}
    assert await traced.post(CHAT, body) == 200
    told = " ".join(span.to_json() for span in traced.spans)
    for text in ("xyzzy", "plugh", "frobozz", "the end"):
        assert text not in told
