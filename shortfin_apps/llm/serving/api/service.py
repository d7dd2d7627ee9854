"""State shared by all routes: the model (once loaded), defaults, limits and metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from shortfin_apps.llm.contract.errors import UnavailableError
from shortfin_apps.llm.serving.api.limits import Limits
from shortfin_apps.llm.serving.api.responses.store import ResponseStore
from shortfin_apps.llm.serving.api.sampling import SamplingDefaults
from shortfin_apps.llm.serving.dialects.dialect import NO_DIALECT, Dialect
from shortfin_apps.llm.serving.engine_link.messages import (
    AbortAll,
    AbortRequests,
    Command,
    ReadMetrics,
    SetLogLevel,
)
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.frontend.text_generation import TextGenerator
from shortfin_apps.llm.serving.receipts.draft import ModelIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptSettings:
    """Settings of receipts. `are_default`: answers have receipts unless the request declines them."""

    are_default: bool = False
    signer: Signer | None = None


NO_RECEIPTS = ReceiptSettings()

PROBE_TIMEOUT_S = 20.0  # SGLang's

if TYPE_CHECKING:  # optional dependencies (extras)
    from opentelemetry.sdk.trace import TracerProvider

    from shortfin_apps.llm.serving.receipts.signature import Signer

Everywhere = Callable[[Command], Awaitable[Sequence[float]]]
"""Executes a command in all processes of a server; returns the commands' counts, summed over processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A loaded model. `exported_top_k`: the candidates that the VMFB returns; None: it returns all logits."""

    generator: TextGenerator
    native_defaults: SamplingDefaults
    openai_defaults: SamplingDefaults
    exported_top_k: int | None
    dialect: Dialect = NO_DIALECT  # the format of reasoning and tool calls
    info: Mapping[str, Any]  # for /server_info
    everywhere: Everywhere | None = None  # None: this server has no other process
    identity: ModelIdentity | None = None  # None: unknown, so receipts are not available


class Service:
    """The state of one server. `serve` sets the model once it is loaded."""

    def __init__(
        self,
        *,
        name: str,
        source: str | None = None,
        metrics: ServerMetrics,
        config: Mapping[str, Any],
        limits: Limits | None = None,
        strict_fields: bool = False,
        receipts: ReceiptSettings = NO_RECEIPTS,
        stream_keep_alive_s: float | None = None,
        responses: ResponseStore | None = None,
        probe_timeout_s: float = PROBE_TIMEOUT_S,
        traces: TracerProvider | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name  # as clients see it
        self.source = source  # as the user typed it; accepted as the model's name in requests
        self.clock = clock  # seconds since the epoch
        self.created = int(clock())
        self.metrics = metrics
        self.limits = limits or Limits()
        self.strict_fields = strict_fields  # unknown fields of a body are refused
        self.receipts = receipts
        self.stream_keep_alive_s = stream_keep_alive_s  # None: streams send no comments
        self.responses = responses or ResponseStore(0, 0.0, time.monotonic)  # the default stores none
        self.probe_timeout_s = probe_timeout_s  # for /health_generate
        self.config = config  # the effective server configuration, for /server_info
        self.stopping = False  # the server is stopping; requests are still accepted during the drain delay
        self.traces = traces  # None: no request is traced
        self._model: ServedModel | None = None
        metrics.show_state(lambda: self.ready, lambda: self.healthy)

    def serve(self, model: ServedModel) -> None:
        self._model = model
        self.metrics.watch(model.generator.engine)

    def close(self) -> None:
        """Export the remaining trace spans. Takes 2 s if the collector does not answer."""
        if self.traces is not None:
            self.traces.shutdown()

    @property
    def model(self) -> ServedModel:
        """The loaded model. Raises UnavailableError while it loads."""
        if self._model is None:
            raise UnavailableError("the model is still loading; /ready answers 200 when it is loaded")
        return self._model

    @property
    def everywhere(self) -> Everywhere | None:
        """The model's `everywhere`; None while it loads."""
        return None if self._model is None else self._model.everywhere

    @property
    def model_info(self) -> Mapping[str, Any] | None:
        """The model's configuration; None while it loads."""
        return None if self._model is None else self._model.info

    @property
    def ready(self) -> bool:
        return not self.stopping and self._model is not None and self._model.generator.engine.ready

    @property
    def healthy(self) -> bool:
        """Whether the engine works; True while the model loads."""
        return self.problem is None

    @property
    def problem(self) -> str | None:
        """Why the engine does not work; None while it does, or the model loads."""
        return None if self._model is None else self._model.generator.engine.problem


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def request_id_of(request: Request) -> str:
    """Return the request's id, which RequestIdMiddleware read from `X-Request-Id` or generated."""
    request_id: str = request.state.request_id
    return request_id


async def carry_out_everywhere(command: Command, service: Service) -> Sequence[float]:
    """Execute the command in all processes; return its counts, summed over processes.

    Raises UnavailableError.
    """
    everywhere = service.everywhere
    return carry_out(command, service) if everywhere is None else await everywhere(command)


async def count_everywhere(command: AbortRequests | AbortAll, service: Service) -> int:
    """Execute the abort in all processes; return the number of aborted sequences. Raises UnavailableError."""
    return int(sum(await carry_out_everywhere(command, service)))


def carry_out(command: Command, service: Service) -> Sequence[float]:
    """Execute a command in this process; return its counts. Raises UnavailableError."""
    match command:
        case AbortRequests(request_ids, tenant):
            abort = service.model.generator.abort
            return [sum(abort(request_id, tenant) for request_id in request_ids)]
        case AbortAll():
            return [service.model.generator.abort_all()]
        case SetLogLevel(level):
            logging.getLogger().setLevel(level)
            return []
        case ReadMetrics():
            return service.metrics.counts()
