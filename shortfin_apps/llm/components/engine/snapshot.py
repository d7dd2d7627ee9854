"""Snapshots of an engine between steps: its requests, and which request owns each page.

Snapshots contain no text and no tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.scheduler import Scheduler
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.request.request import Request, State
from shortfin_apps.llm.contract.abi import EntryClass

MAX_REQUESTS = 256  # listed running requests; as many waiting ones are listed
MAX_TENANTS = 64
MAX_CELLS = 8192  # per page map

# Values of a page map's cells. OWNED + i is a page of the request at index i of `Snapshot.requests`; UNLISTED
# is a page of a request that is not listed there.
FREE, CACHED, SHARED, UNLISTED, OWNED = range(5)


class RequestSnapshot(NamedTuple):
    """A running or waiting request. Only running requests have pages; `age_s` counts from arrival."""

    request_id: str
    tenant: str
    state: State
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the cache
    computed_tokens: int  # prompt and output tokens with K/V in the request's pages
    output_tokens: int
    max_tokens: int  # output tokens
    pages: int
    age_s: float


class TenantSnapshot(NamedTuple):
    """Number of a tenant's running and waiting requests."""

    tenant: str
    running: int
    waiting: int


class PageMap(NamedTuple):
    """Run-length encoded states of a pool's pages by ID, without the scratch page.

    Only every `step`-th page has a cell.

    `runs` alternates cell values and run lengths: `[FREE, 12, SHARED, 3]` is a pool with 12 free pages
    followed by 3 pages that several requests share.
    """

    step: int
    runs: tuple[int, ...]


class InvocationMix(NamedTuple):
    """How many tokens of which kind an entry computed in one step.

    `at_s` is when the step ended, on the engine's clock; `duration_s` is how long the step took.
    """

    serial: int  # number of the step among recorded steps, from 1
    at_s: float
    duration_s: float
    entry: str
    entry_class: EntryClass
    prefill_tokens: int
    decode_tokens: int
    padded_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of an engine between two steps, taken at `at_s`, on the same clock as `invocations`.

    `requests` lists the oldest MAX_REQUESTS running requests and the first MAX_REQUESTS waiting ones.
    `tenants` lists the MAX_TENANTS tenants with the most requests. `stats` counts all requests. `window_map`
    is None for a model without windows.
    """

    at_s: float
    stats: EngineStats
    requests: tuple[RequestSnapshot, ...]
    tenants: tuple[TenantSnapshot, ...]
    page_map: PageMap
    window_map: PageMap | None
    invocations: tuple[InvocationMix, ...] = ()
    taken_s: float = 0.0  # CPU time that the engine's thread took for this snapshot


def take_snapshot(
    scheduler: Scheduler, cache: KVCache, stats: EngineStats, *, at_s: float, now_s: float
) -> Snapshot:
    """Take a snapshot of the current state; `now_s` is on the same clock as `Request.arrival_s`."""
    running = scheduler.running
    listed = chain(running[:MAX_REQUESTS], islice(scheduler.waiting, MAX_REQUESTS))
    window_usage = cache.window_usage()
    window_map = None
    if window_usage is not None:
        tables = [_window_page_ids(request) for request in running]
        window_map = page_map(window_usage.total, cache.cached_window_page_ids(), tables)
    return Snapshot(
        at_s=at_s,
        stats=stats,
        requests=tuple(_request_snapshot(request, now_s) for request in listed),
        tenants=_tenants(running, scheduler.waiting.counts()),
        page_map=page_map(
            cache.usage().total, cache.cached_page_ids(), [request.page_ids for request in running]
        ),
        window_map=window_map,
    )


def page_map(num_pages: int, cached_page_ids: Sequence[int], tables: Sequence[Sequence[int]]) -> PageMap:
    """Create the map of pages 1 to `num_pages`; each of `tables` lists a request's pages, each once."""
    cells: npt.NDArray[Any] = np.full(num_pages + 1, FREE, np.int32)
    cells[np.asarray(cached_page_ids, np.int64)] = CACHED
    num_tables = np.zeros(num_pages + 1, np.int32)
    for index, table in enumerate(tables):
        page_ids = np.asarray(table, np.int64)
        num_tables[page_ids] += 1
        cells[page_ids] = OWNED + index if index < MAX_REQUESTS else UNLISTED
    cells[num_tables > 1] = SHARED
    step = max(1, -(-num_pages // MAX_CELLS))
    return PageMap(step, _runs(cells[1::step]))


def _runs(cells: npt.NDArray[Any]) -> tuple[int, ...]:
    begins = np.flatnonzero(np.diff(cells, prepend=-1))
    lengths = np.diff(begins, append=len(cells))
    runs: list[int] = np.column_stack((cells[begins], lengths)).ravel().tolist()
    return tuple(runs)


def _window_page_ids(request: Request) -> Sequence[int]:
    """Return the window pages that the request holds, without pages that were given up."""
    assert request.lease is not None, "a running request has pages"
    return request.lease.held_window_page_ids


def _request_snapshot(request: Request, now_s: float) -> RequestSnapshot:
    return RequestSnapshot(
        request_id=request.request_id,
        tenant=request.tenant,
        state=request.state,
        prompt_tokens=len(request.call.prompt_token_ids),
        cached_tokens=request.num_cached,
        computed_tokens=request.num_computed,
        output_tokens=request.num_generated,
        max_tokens=request.call.params.max_tokens,
        pages=0 if request.lease is None else request.num_pages,
        age_s=now_s - request.arrival_s,
    )


def _tenants(running: Iterable[Request], waiting: Counter[str]) -> tuple[TenantSnapshot, ...]:
    run = Counter(request.tenant for request in running)
    most = (run + waiting).most_common(MAX_TENANTS)
    return tuple(TenantSnapshot(tenant, run[tenant], waiting[tenant]) for tenant, _ in most)
