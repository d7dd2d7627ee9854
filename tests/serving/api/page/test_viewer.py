from __future__ import annotations

from typing import Any

import orjson
import pytest

from shortfin_apps.llm.components.engine.engine_watch import EngineWatch
from shortfin_apps.llm.components.engine.snapshot import OWNED, SHARED, UNLISTED, PageMap
from shortfin_apps.llm.components.request.messages import Terms
from shortfin_apps.llm.serving.api.page.viewer import Viewer, client_id
from shortfin_apps.llm.serving.http.access_log import claimed_tenant
from shortfin_apps.llm.serving.http.auth import ANONYMOUS, Caller
from tests.components.engine_fixture import PROMPT, call, make_rig
from tests.components.fake_device import fake_config

ADMIN = Caller("root", "root", is_admin=True)
OTHER = [p + 1 for p in PROMPT]


def seen_by(caller: Caller) -> dict[str, Any]:
    """What a caller sees of two tenants' requests that run, whose prompts share nothing."""
    rig = make_rig(fake_config(pages=64))
    for name, tenant, prompt in (("one.1", "x", PROMPT), ("two.0-2", "y", OTHER), ("three.3", "x", PROMPT)):
        rig.engine.add(call(name, prompt, max_tokens=9, terms=Terms(tenant=tenant)))
    while rig.engine.stats().num_running < 3:
        rig.step()
    view = orjson.loads(orjson.dumps(Viewer.of(caller).view(rig.engine.snapshot(0.0))))
    rig.run()
    assert isinstance(view, dict)
    return view


def names(view: dict[str, Any]) -> list[str]:
    return [request["rid"] for request in view["requests"]]


def test_an_admin_sees_the_requests_of_all() -> None:
    view = seen_by(ADMIN)
    assert sorted(names(view)) == ["one", "three", "two"]
    assert sorted(map(tuple, view["tenants"])) == [("x", 2, 0), ("y", 1, 0)]
    assert UNLISTED not in view["map"]["runs"][::2]


def test_a_tenant_sees_its_own_and_the_sums() -> None:
    view = seen_by(Caller("x", "x"))
    assert sorted(names(view)) == ["one", "three"]
    assert view["tenants"] == [["x", 2, 0]]
    assert view["running"] == 3
    assert '"y"' not in orjson.dumps(view).decode()
    assert "two" not in orjson.dumps(view).decode()
    values = set(view["map"]["runs"][::2])
    assert UNLISTED in values, "the other's pages are there, without a name"
    assert values <= {0, 1, SHARED, UNLISTED, OWNED, OWNED + 1}


def test_cells_of_the_map_belong_to_the_places_in_the_list() -> None:
    """A tenant's second request is at another place in the list of all."""
    view = seen_by(Caller("y", "y"))
    assert names(view) == ["two"]
    runs = view["map"]["runs"]
    owned = sum(runs[i + 1] for i in range(0, len(runs), 2) if runs[i] == OWNED)
    assert owned == view["requests"][0]["pages"]
    assert not [value for value in runs[::2] if value > OWNED]


def test_a_stranger_with_a_key_sees_sums_alone() -> None:
    view = seen_by(Caller("z", "z"))
    assert (view["requests"], view["tenants"], view["running"]) == ([], [], 3)


def test_steps_name_their_entry_and_its_class() -> None:
    rig = make_rig(mode="extend-attention")
    watch = EngineWatch(rig.engine, lambda: 0.0)
    watch.look(0)
    before = rig.engine.stats()
    rig.engine.add(call("one.1", PROMPT, max_tokens=3))
    rig.run()
    watch.note(before, rig.engine.stats())
    steps = Viewer.of(ADMIN).view(watch.look(0))["steps"]
    assert {(entry, kind) for _, _, _, entry, kind, *_ in steps} == {
        ("extend", "dynamic"),
        ("decode_bs1", "static"),
    }


def test_without_keys_names_that_clients_made_up_are_hashed() -> None:
    view = seen_by(ANONYMOUS)
    assert len(view["requests"]) == 3
    assert {request["tenant"] for request in view["requests"]} == {claimed_tenant("x"), claimed_tenant("y")}
    assert {name for name, *_ in view["tenants"]} == {claimed_tenant("x"), claimed_tenant("y")}


@pytest.mark.parametrize(
    ("engine_id", "expected"),
    [("abc.7", "abc"), ("a.b.7", "a.b"), ("abc.2-7", "abc"), ("abc.7/4/1", "abc"), ("a/b.7/4/1", "a/b")],
)
def test_a_request_is_shown_by_the_id_that_aborts_it(engine_id: str, expected: str) -> None:
    assert client_id(engine_id) == expected


def test_runs_keep_their_lengths() -> None:
    rig = make_rig(fake_config(pages=9))
    view = Viewer.of(ADMIN).view(rig.engine.snapshot(0.0))
    assert view["map"] == {"step": 1, "runs": list(PageMap(1, (0, 8)).runs)}
    assert view["window_map"] is None
