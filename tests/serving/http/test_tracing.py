from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from shortfin_apps.llm.components.request.messages import ComputedTask, Delta, FinishReason, GenerateCall
from shortfin_apps.llm.contract.errors import InvocationError
from shortfin_apps.llm.serving.frontend.metrics import RequestTimer, ServerMetrics
from shortfin_apps.llm.serving.frontend.text_stream import PendingAnswer
from shortfin_apps.llm.serving.http.tracing import SequenceSpans
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


EPOCH_S = 1000.0


def task(began_s: float, start: int, tokens: int, *, seconds: float = 1.0) -> ComputedTask:
    family = "prefill" if tokens > 1 else "decode"
    return ComputedTask(
        began_s, began_s + seconds, began_s / 2, (began_s + seconds) / 2, start, tokens, family, 2
    )


def timer_at(clock: list[float]) -> RequestTimer:
    return ServerMetrics("m", lambda: clock[-1]).start_request(8, 9, is_traced=True)


def spans_of(timer: RequestTimer, num_prompt: int = 8, now_s: float = 99.0) -> list[ReadableSpan]:
    """By their start; the first is `generate`."""
    memory = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    request = SimpleNamespace(prompt_token_ids=(1,) * num_prompt, choice=0)
    answer = cast(PendingAnswer, SimpleNamespace(timer=timer, request=request))
    SequenceSpans(provider.get_tracer("t"), Context(), EPOCH_S).record(answer, now_s)
    made = sorted(
        memory.get_finished_spans(), key=lambda span: (span.start_time or 0, span.parent is not None)
    )
    assert made[0].parent is None
    assert all(each.parent is not None for each in made[1:])
    return made


def seconds(span: ReadableSpan) -> tuple[str, float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.name, span.start_time / 1e9 - EPOCH_S, span.end_time / 1e9 - EPOCH_S


def test_a_sequence_waits_is_prefilled_in_chunks_and_decoded() -> None:
    clock = [1.0]
    timer = timer_at(clock)
    assert timer.computed is not None
    timer.computed += [task(2.0, 0, 4), task(3.0, 4, 4), task(4.0, 8, 1), task(7.0, 10, 1)]
    clock.append(4.5)
    timer.tokens(1, 1.0)
    clock.append(8.5)
    timer.tokens(3, 1.0)
    timer.finish(FinishReason.LENGTH)
    made = spans_of(timer)
    assert list(map(seconds, made)) == [
        ("generate", 1.0, 8.5),
        ("queue", 1.0, 2.0),
        ("prefill", 2.0, 3.0),
        ("prefill", 3.0, 4.0),
        ("decode", 4.0, 8.0),
        ("detokenize", 4.5, 8.5),
    ]
    decode: dict[str, Any] = dict(made[4].attributes or {})
    assert decode["shortfin_llm.tokens"] == 3
    assert decode["shortfin_llm.device.seconds"] == 2.0
    assert [event.name for event in made[4].events] == ["first token"]


def test_the_end_of_a_decode_that_the_engine_did_not_tell_is_that_of_the_last_token_read() -> None:
    clock = [1.0]
    timer = timer_at(clock)
    assert timer.computed is not None
    timer.computed += [task(2.0, 0, 8), task(3.0, 8, 1)]
    clock.append(4.0)
    timer.tokens(1, 1.0)
    clock.append(9.0)
    timer.tokens(5, 1.0)
    timer.finish(FinishReason.STOP)
    [decode] = [span for span in spans_of(timer) if span.name == "decode"]
    assert seconds(decode) == ("decode", 3.0, 9.0)
    assert "shortfin_llm.device.seconds" not in (decode.attributes or {})


def test_what_is_computed_again_after_a_preemption_is_told_apart() -> None:
    clock = [1.0]
    timer = timer_at(clock)
    assert timer.computed is not None
    timer.computed += [task(2.0, 0, 8), task(3.0, 8, 1), task(5.0, 0, 6), task(6.0, 6, 4), task(7.0, 10, 1)]
    clock.append(9.0)
    timer.tokens(4, 1.0)
    timer.finish(FinishReason.LENGTH)
    made = spans_of(timer)
    again = [
        (span.attributes or {})["shortfin_llm.after_preemption"] for span in made if span.name == "prefill"
    ]
    assert again == [False, True, True]
    [decode] = [span for span in made if span.name == "decode"]
    assert [event.name for event in decode.events] == ["first token", "computed again after a preemption"]


def test_a_request_that_never_started_has_waited() -> None:
    clock = [1.0]
    timer = timer_at(clock)
    clock.append(6.0)
    timer.finish(FinishReason.ABORT)
    assert list(map(seconds, spans_of(timer))) == [("generate", 1.0, 6.0), ("queue", 1.0, 6.0)]


def test_a_failed_request_is_an_error() -> None:
    timer = timer_at([1.0])
    timer.finish(FinishReason.ERROR)
    assert spans_of(timer)[0].status.status_code is StatusCode.ERROR


@given(
    tasks=st.lists(
        st.builds(task, st.floats(0, 50), st.integers(0, 20), st.integers(1, 8), seconds=st.floats(0, 5)),
        max_size=9,
    ),
    counts=st.lists(st.integers(1, 3), max_size=4),
    reason=st.none() | st.sampled_from(FinishReason),
    num_prompt=st.integers(1, 12),
)
def test_whatever_was_told_every_span_ends_after_it_began(
    tasks: list[ComputedTask], counts: list[int], reason: FinishReason | None, num_prompt: int
) -> None:
    clock = [0.0]
    timer = timer_at(clock)
    assert timer.computed is not None
    timer.computed += sorted(tasks)
    for count in counts:
        clock.append(clock[-1] + 3.0)
        timer.tokens(count, 0.0)
    if reason is not None:
        timer.finish(reason)
    for name, began_s, ended_s in map(seconds, spans_of(timer, num_prompt)[1:]):
        assert began_s <= ended_s, name
