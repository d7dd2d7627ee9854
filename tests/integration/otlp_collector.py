"""A receiver of spans by OTLP over HTTP, with the official protobuf messages.

OpenTelemetry's own collector is on neither Debian nor PyPI; this is what tests have of it.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

SERVER = Span.SPAN_KIND_SERVER


@dataclass
class Collector:
    """What has been received, in the order of its arrival. `url` is the base that exporters are given."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def roots(self) -> list[Span]:
        """The spans of HTTP requests."""
        return [span for span in self.spans if span.kind == SERVER]

    def below(self, parent: Span) -> list[Span]:
        """By their start."""
        children = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(children, key=lambda span: span.start_time_unix_nano)

    def tree(self, parent: Span, depth: int = 0) -> str:
        """A span and those below it, one a line, with milliseconds since the first one's start."""
        lines: list[str] = []
        self._draw(parent, parent.start_time_unix_nano, depth, lines)
        return "\n".join(lines)

    def _draw(self, span: Span, origin_ns: int, depth: int, lines: list[str]) -> None:
        began, ended = ((ns - origin_ns) / 1e6 for ns in (span.start_time_unix_nano, span.end_time_unix_nano))
        lines.append(f"{'  ' * depth + span.name:32} {began:9.2f} {ended:9.2f}  {attributes(span)}")
        for child in self.below(span):
            self._draw(child, origin_ns, depth + 1, lines)


def attributes(span: Any) -> dict[str, Any]:
    """Those of a span, a resource or an event."""
    return {each.key: _plain(each.value) for each in span.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens on a free port of this machine."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path != "/v1/traces" or self.headers["Content-Type"] != "application/x-protobuf":
                self.send_error(404)
                return
            collector.headers.append(dict(self.headers))
            for each in ExportTraceServiceRequest.FromString(body).resource_spans:
                collector.resources.append(attributes(each.resource))
                collector.spans += [span for scope in each.scope_spans for span in scope.spans]
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
