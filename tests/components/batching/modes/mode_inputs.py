"""Inputs for tests of modes: running requests at a stride of 16, and what a VMFB has."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.components.kvcache import make_cache
from shortfin_apps.llm.components.request.request import Request
from tests.components.engine_fixture import call

STRIDE = 16


@dataclass(frozen=True)
class Entries:
    """A VMFB's entries, by default with everything that a mode may need."""

    has_extend: bool = True
    has_packed_extend: bool = True
    takes_followers: bool = True
    takes_any_chunk: bool = True


ALL_ENTRIES = Entries()


def running(request_id: str, length: int, computed: int = 0) -> Request:
    """A request of `length` tokens, the first `computed` of which are in the cache."""
    cache = make_cache("none", 1024, STRIDE)
    request = Request(call(request_id, [1] * length))
    lease = cache.acquire(request.token_ids)
    assert cache.reserve(lease, length)
    request.start(lease)
    request.num_computed = request.num_planned = computed
    return request
