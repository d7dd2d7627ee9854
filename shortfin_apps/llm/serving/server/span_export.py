"""Bounds span export: the size and time of reading a collector's answer, and the wait at shutdown.

Imports OpenTelemetry's SDK and its exporter, which are an extra.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from io import BytesIO
from typing import Any

import requests
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

LAST_SPANS_S = 2.0
MAX_ANSWER_BYTES = 4096  # the exporter needs only the status, and may log the text
MAX_ANSWER_S = 2.0
CREDENTIAL_VARIABLES = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
)
CREDENTIAL_GROUP = "opentelemetry_otlp_credential_provider"  # group of entry points


class BoundedProvider(TracerProvider):
    """A TracerProvider that exports the last spans in `shutdown`, but waits at most LAST_SPANS_S.

    The SDK itself waits for 30 s, and then for the current request.
    """

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource=resource)  # also registers `shutdown` for interpreter exit
        self._shutdown_asked, self._shutdown_done = threading.Event(), threading.Event()
        # A daemon thread, so that the process can exit. It starts now, as none can start at interpreter exit.
        threading.Thread(target=self._shut_down_when_asked, name="last spans", daemon=True).start()

    def shutdown(self) -> None:
        """Export the last spans. A second call is a no-op."""
        if self._shutdown_asked.is_set():
            return
        self._shutdown_asked.set()
        if not self._shutdown_done.wait(LAST_SPANS_S):
            logger.warning("the last spans are lost: their collector did not take them in %g s", LAST_SPANS_S)

    def _shut_down_when_asked(self) -> None:
        self._shutdown_asked.wait()
        try:
            super().shutdown()
        finally:
            self._shutdown_done.set()


def bounded_session(environment: Mapping[str, str]) -> requests.Session | None:
    """Return an HTTP session for the exporter, with bounded answers.

    The session comes from the credential provider that OpenTelemetry's variables name; without such a
    variable, it is a plain session. Returns None if the provider is missing or returns no session; the
    exporter then reports the problem.
    """
    session = _session(environment)
    if not isinstance(session, requests.Session):
        return None
    session.hooks["response"].append(read_bounded)
    return session


def read_bounded(
    response: requests.Response, *_: object, clock: Callable[[], float] = time.monotonic, **__: object
) -> None:
    """Read the body before `requests` does, up to a size and time limit; drop the rest. A response hook."""
    raw, body, give_up_s = response.raw, bytearray(), clock() + MAX_ANSWER_S
    is_whole = False
    while not is_whole and len(body) < MAX_ANSWER_BYTES and clock() < give_up_s:
        byte = raw.read(1)  # buffered; a larger read would wait for all of its bytes
        body += byte
        is_whole = not byte
    if not is_whole:
        raw.close()  # also closes the connection
    response.raw = BytesIO(body)


def _session(environment: Mapping[str, str]) -> Any:
    name = next((environment[each] for each in CREDENTIAL_VARIABLES if environment.get(each)), None)
    if name is None:
        return requests.Session()
    found = next(iter(entry_points(group=CREDENTIAL_GROUP, name=name)), None)
    return None if found is None else found.load()()
