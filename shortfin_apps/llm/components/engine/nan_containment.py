"""NaN containment: NaN that an invocation wrote into a request's pages must not reach any other request.

A program may multiply what its mask hides by 0, which leaves NaN what it is. So pages are suspect from the
invocation that wrote them until a finite row has attended to them, and suspect pages that were freed are
zeroed before the next invocation.
"""

from __future__ import annotations

from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.kvcache.base import KVCache
from shortfin_apps.llm.components.request.request import Request


def clear_freed_pages(cache: KVCache, runner: BatchRunner) -> None:
    """Zeroes the suspect pages that were freed; before anything is computed into or beside them."""
    if cache.has_suspects:
        runner.clear_pages(cache.suspects, cache.window_suspects)
        cache.suspects.clear()
        cache.window_suspects.clear()


def suspect_pages(request: Request) -> None:
    """Has the request's own pages zeroed before anybody else gets them."""
    if request.lease is not None:
        request.lease.is_suspect = True


def trust_pages(request: Request) -> None:
    """For a request with a finite row, which has attended to all of its pages."""
    assert request.lease is not None
    request.lease.is_suspect = False


def retract_pages(cache: KVCache, request: Request) -> None:
    """For a request with a row of NaN: one of its pages has NaN, so what it shared is found no more."""
    suspect_pages(request)
    assert request.lease is not None
    cache.retract(request.lease)
