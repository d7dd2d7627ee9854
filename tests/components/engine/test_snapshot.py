from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.engine import snapshot as module
from shortfin_apps.llm.components.engine.snapshot import (
    CACHED,
    FREE,
    MAX_REQUESTS,
    OWNED,
    SHARED,
    UNLISTED,
    PageMap,
    Snapshot,
    page_map,
)
from shortfin_apps.llm.components.request.messages import Terms
from shortfin_apps.llm.components.request.request import State
from tests.components.engine_fixture import PROMPT, Rig, call, make_rig
from tests.components.fake_device import fake_config


def cells(pages: PageMap) -> list[int]:
    pairs = zip(pages.runs[::2], pages.runs[1::2], strict=True)
    return [value for value, length in pairs for _ in range(length)]


def expected_cell(page_id: int, cached: list[int], tables: list[list[int]]) -> int:
    owners = [index for index, table in enumerate(tables) if page_id in table]
    if len(owners) > 1:
        return SHARED
    if owners:
        return OWNED + owners[0]
    return CACHED if page_id in cached else FREE


@given(st.data(), st.integers(1, 40))
def test_a_page_map_shows_each_page_by_its_owner(data: st.DataObject, num_pages: int) -> None:
    page_ids = st.lists(st.integers(1, num_pages), unique=True)
    tables = data.draw(st.lists(page_ids, max_size=6))
    leased = {page_id for table in tables for page_id in table}
    cached = [page_id for page_id in data.draw(page_ids) if page_id not in leased]
    found = page_map(num_pages, cached, tables)
    assert cells(found) == [expected_cell(page_id, cached, tables) for page_id in range(1, num_pages + 1)]
    values = found.runs[::2]
    assert all(one != next_one for one, next_one in pairwise(values))
    assert found.step == 1


def test_pages_of_requests_that_are_not_listed_are_marked() -> None:
    tables = [[page_id] for page_id in range(1, MAX_REQUESTS + 3)]
    found = cells(page_map(MAX_REQUESTS + 2, [], tables))
    assert found == [*range(OWNED, OWNED + MAX_REQUESTS), UNLISTED, UNLISTED]


@given(num_pages=st.integers(1, 100), most=st.integers(1, 20))
def test_a_large_pool_is_sampled_evenly(num_pages: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_CELLS", most)
        found = page_map(num_pages, list(range(1, num_pages + 1)), [])
    assert len(cells(found)) <= most
    assert (len(cells(found)) - 1) * found.step < num_pages <= len(cells(found)) * found.step


def take(rig: Rig) -> Snapshot:
    before = rig.cache.usage(), rig.engine.stats()
    found = rig.engine.snapshot(at_s=7.0)
    rig.cache.check_integrity()
    assert (rig.cache.usage(), rig.engine.stats()) == before, "looking changes nothing"
    assert cells(found.page_map).count(CACHED) == found.stats.pages.cached
    assert cells(found.page_map).count(FREE) == found.stats.pages.free
    return found


def test_an_idle_engine_has_free_pages_alone() -> None:
    found = take(make_rig(fake_config(pages=9)))
    assert not (found.requests)
    assert not (found.tenants)
    assert not found.invocations
    assert found.page_map == PageMap(1, (FREE, 8))
    assert found.window_map is None
    assert found.at_s == 7.0


def test_requests_are_listed_with_what_they_hold_and_those_that_wait_after_them() -> None:
    rig = make_rig(fake_config(pages=64), max_running=2, clock=iter(range(1000)).__next__)
    for name, tenant in (("a.1", "x"), ("b.2", "y"), ("c.3", "x")):
        rig.engine.add(call(name, PROMPT, max_tokens=9, terms=Terms(tenant=tenant)))
    while rig.engine.stats().generation_tokens < 4:
        rig.step()
    found = take(rig)
    a, b, c = found.requests
    assert [request.state for request in found.requests] == [State.RUNNING, State.RUNNING, State.WAITING]
    assert (a.request_id, a.tenant, a.prompt_tokens, a.max_tokens) == ("a.1", "x", len(PROMPT), 9)
    assert a.output_tokens >= 1
    assert a.pages > 0
    assert a.age_s > c.age_s > 0
    assert (c.pages, c.computed_tokens, c.output_tokens) == (0, 0, 0)
    assert sorted(found.tenants) == [("x", 1, 1), ("y", 1, 0)]
    # Both have the same prompt, whose full pages they share.
    num_shared = cells(found.page_map).count(SHARED)
    assert num_shared > 0
    assert cells(found.page_map).count(OWNED) == a.pages - num_shared
    assert cells(found.page_map).count(OWNED + 1) == b.pages - num_shared
    rig.run()
    assert take(rig).requests == ()
    assert rig.all_pages_back()


def test_pages_of_windows_have_a_map_of_their_own() -> None:
    rig = make_rig(fake_config(pages=64, window=6), more_window_pages=8)
    rig.engine.add(call("a.1", PROMPT, max_tokens=9))
    while not rig.engine.stats().generation_tokens:
        rig.step()
    found = take(rig)
    usage = rig.cache.window_usage()
    assert found.window_map is not None
    assert usage is not None
    counts = [cells(found.window_map).count(value) for value in (FREE, CACHED, OWNED)]
    assert counts == [usage.free, usage.cached, usage.leased]
    rig.run()


def test_no_text_and_no_token_is_in_it() -> None:
    rig = make_rig(fake_config(pages=64))
    rig.engine.add(call("a.1", PROMPT, max_tokens=3))
    rig.step()
    (request,) = take(rig).requests
    assert not any(isinstance(value, (list, tuple)) for value in request)
    rig.run()
