"""Requests that are running, at a stride of 16, for tests of modes."""

from __future__ import annotations

from shortfin_apps.llm.components.kvcache import make_cache
from shortfin_apps.llm.components.request.request import Request
from tests.components.engine_fixture import call

STRIDE = 16


def running(request_id: str, length: int, computed: int = 0) -> Request:
    """One whose first `computed` of `length` tokens are in the cache."""
    cache = make_cache("none", 1024, STRIDE)
    request = Request(call(request_id, [1] * length))
    lease = cache.acquire(request.tokens)
    assert cache.reserve(lease, length)
    request.start(lease)
    request.num_computed = computed
    return request
