"""Traces of real servers, received by OTLP over HTTP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from tests.integration.otlp_collector import Collector, attributes, collecting
from tests.integration.server_process import start, stop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
PROMPT = "The capital of France is Paris, and " * 4
MAX_TOKENS = 12
BODY = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
CHUNK_TOKENS = 64


@pytest.mark.parametrize("processes", ["0", "2"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_traced_from_http_to_the_device(
    tiny_artifact: Artifact, processes: str, stream: bool
) -> None:
    with collecting() as collector:
        flags = ("--token-budget", str(CHUNK_TOKENS), "--api-processes", processes)
        service = start(tiny_artifact, "--otlp-endpoint", collector.url, *flags)
        url = f"{service.url}/v1/completions"
        answer = httpx.post(url, json={**BODY, "stream": stream}, headers=TRACEPARENT, timeout=60)
        assert answer.status_code == 200
        assert stop(service) == 0
    [root] = collector.roots()
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    print(collector.tree(root))
    _check_tree(collector)
    [resource, *_] = collector.resources
    assert resource["service.name"] == "shortfin-llm"
    assert all(PROMPT not in str(span) for span in collector.spans)


def _check_tree(collector: Collector) -> None:
    [root] = collector.roots()
    generate, send = collector.below(root)
    assert (generate.name, send.name) == ("generate", "send")
    queue, *chunks, decode, detokenize = collector.below(generate)
    assert [queue.name, decode.name, detokenize.name] == ["queue", "decode", "detokenize"]
    assert {chunk.name for chunk in chunks} == {"prefill"}
    told = [attributes(chunk) for chunk in chunks]
    num_prompt = attributes(root)["gen_ai.usage.input_tokens"]
    assert len(chunks) == -(-num_prompt // CHUNK_TOKENS) > 1
    assert sum(chunk["shortfin_llm.tokens"] for chunk in told) == num_prompt
    assert all(chunk["shortfin_llm.device.seconds"] > 0 for chunk in told)
    assert attributes(decode)["shortfin_llm.tokens"] == MAX_TOKENS - 1
    assert attributes(decode)["shortfin_llm.device.seconds"] > 0
    # One clock: what follows does not begin before what it follows has ended.
    ends = [queue, *chunks, decode]
    for before, after in pairwise(ends):
        assert before.end_time_unix_nano <= after.start_time_unix_nano
    for each in (generate, send):
        assert root.start_time_unix_nano <= each.start_time_unix_nano
        assert each.end_time_unix_nano <= root.end_time_unix_nano
    assert generate.start_time_unix_nano <= queue.start_time_unix_nano
    assert decode.end_time_unix_nano <= generate.end_time_unix_nano


def test_opentelemetrys_variables_name_the_collector_the_sampler_and_the_headers(
    tiny_artifact: Artifact,
) -> None:
    with collecting() as collector:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-team=llm",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_SERVICE_NAME": "chat",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.0",
        }
        service = start(tiny_artifact, environment=environment)
        for headers in ({}, TRACEPARENT, {"traceparent": f"00-{TRACE}-{PARENT}-00"}):
            httpx.post(f"{service.url}/v1/completions", json=BODY, headers=headers, timeout=60)
        assert stop(service) == 0
    [root] = collector.roots()
    assert root.trace_id.hex() == TRACE, "the one that its parent sampled"
    assert collector.resources[0]["service.name"] == "chat"
    assert collector.headers[0]["x-team"] == "llm"


def test_a_server_whose_collector_is_away_serves_and_ends(tiny_artifact: Artifact) -> None:
    environment = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    service = start(tiny_artifact, "--otlp-endpoint", "http://127.0.0.1:9", environment=environment)
    assert httpx.post(f"{service.url}/v1/completions", json=BODY, timeout=60).status_code == 200
    assert stop(service) == 0


def test_crowds_that_are_preempted_refused_or_leave_have_whole_traces(tiny_artifact: Artifact) -> None:
    load = ("--pages", "24", "--max-queue", "4", "--max-running", "8")
    flags = (*load, "--api-processes", "2", "--chunk-tokens", str(CHUNK_TOKENS))
    with collecting() as collector:
        service = start(tiny_artifact, "--otlp-endpoint", collector.url, *flags)
        url = f"{service.url}/v1/completions"

        def ask(index: int) -> int:
            body = {**BODY, "prompt": str(index) + PROMPT, "max_tokens": 100, "stream": index % 2 == 0}
            with httpx.stream("POST", url, json=body, timeout=60) as answer:
                if index % 6 == 0:  # leaves with its first bytes
                    next(answer.iter_raw(), None)
                else:
                    answer.read()
            return answer.status_code

        with ThreadPoolExecutor(24) as pool:
            statuses = list(pool.map(ask, range(48)))
        preemptions = service.metric("vllm:num_preemptions_total")
        assert stop(service) == 0
    roots = collector.roots()
    assert sorted(attributes(root)["http.response.status_code"] for root in roots) == sorted(statuses)
    assert {200, 429} <= set(statuses)
    assert preemptions > 0
    again = [span for span in collector.spans if attributes(span).get("shortfin_llm.after_preemption")]
    assert again, "what was computed again after a preemption is told apart"
    known = {span.span_id for span in roots}
    for span in collector.spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.span_id in known or any(span.parent_span_id == other.span_id for other in collector.spans)
    for root in roots:
        below = [span.name for span in collector.below(root)]
        is_answered = attributes(root)["http.response.status_code"] == 200
        assert below == (["generate", "send"] if is_answered else ["send"])
