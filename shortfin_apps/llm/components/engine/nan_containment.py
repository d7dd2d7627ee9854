"""NaN containment: NaN written into a request's pages must not reach any other request.

A program may mask values by multiplying them by 0, which keeps NaN. Pages are therefore suspect from the
invocation that wrote them until a finite row has attended to them, and suspect pages that were freed are
zeroed before the next invocation.
"""

from __future__ import annotations

from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.request.request import Request


def clear_freed_pages(cache: KVCache, runner: BatchRunner) -> None:
    """Zero freed suspect pages, before any invocation writes or reads the pages."""
    if cache.has_suspects:
        runner.clear_pages(cache.suspects, cache.window_suspects)
        cache.suspects.clear()
        cache.window_suspects.clear()


def suspect_pages(request: Request) -> None:
    """Have the request's own pages zeroed before another request gets them."""
    if request.lease is not None:
        request.lease.is_suspect = True


def trust_pages(request: Request) -> None:
    """Clear the suspicion after a finite row, which has attended to all of the request's pages."""
    assert request.lease is not None
    request.lease.is_suspect = False


def retract_pages(cache: KVCache, request: Request) -> None:
    """Withdraw the request's published pages after a NaN row, as one of its pages holds NaN."""
    suspect_pages(request)
    assert request.lease is not None
    cache.retract(request.lease)
