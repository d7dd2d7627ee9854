"""Executes commands in all processes that answer requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shortfin_apps.llm.serving.api.service import Service
from shortfin_apps.llm.serving.engine_link.messages import (
    AbortAll,
    AbortRequests,
    Command,
    ReadMetrics,
    SetLogLevel,
)


async def carry_out_everywhere(command: Command, service: Service) -> Sequence[float]:
    """Execute the command in all processes; return its sums over them. Raises UnavailableError."""
    everywhere = service.everywhere
    return carry_out(command, service) if everywhere is None else await everywhere(command)


async def count_everywhere(command: AbortRequests | AbortAll, service: Service) -> int:
    """Return the number of sequences that the command aborted. Raises UnavailableError."""
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
