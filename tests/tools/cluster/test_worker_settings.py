from __future__ import annotations

import json
import os

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.server import config_sources
from shortfin_apps.llm.serving.server.config import ServerConfigError, Source
from shortfin_apps.llm.tools.cluster.worker_settings import check, dealt_devices, worker_settings
from tests.serving.server.settings import parse


def test_workers_get_what_is_not_the_routers() -> None:
    config = parse("model", "--port", "80", "--host", "0.0.0.0", "--max-queue", "7", "--api-key", "secret")
    first, second = worker_settings(config, [5001, 5002], ["secret", "worker"], [])
    assert first["max_queue"] == 7
    assert (first["host"], first["port"], second["port"]) == ("127.0.0.1", 5001, 5002)
    assert first["api_key"] == ["secret", "worker"]
    assert "admin_api_key" not in first


def test_the_settings_are_read_back_as_they_were_given() -> None:
    flags = ["--parameters", "a.irpa", "b.irpa", "--no-special-in-content", "--prefix-cache", "none"]
    config = parse("model", "--tenant-weights", "a=3", *flags[3:], "--pages", "auto", "--threads", "2")
    (settings,) = worker_settings(config, [5001], ["k"], ["a"])
    again = config_sources.load({}, Source(values=yaml.safe_load(json.dumps(settings))))
    assert again.model == config.model
    assert again.engine == config.engine
    assert again.requests == config.requests
    assert [key.get_secret_value() for key in (*again.http.api_key, *again.http.admin_api_key)] == ["k", "a"]


def test_cpus_are_dealt_out_unless_threads_are_given() -> None:
    cpus = len(os.sched_getaffinity(0))
    assert worker_settings(parse("m"), [1, 2], [], [])[0]["threads"] == max(1, cpus // 2)
    assert worker_settings(parse("m", "--threads", "9"), [1, 2], [], [])[0]["threads"] == 9
    assert "threads" not in worker_settings(parse("m", "--device", "hip"), [1, 2], [], [])[0]


def test_a_worker_gets_no_more_threads_than_the_runtime_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(256)))
    assert worker_settings(parse("m"), [1, 2], [], [])[0]["threads"] == 64


def test_each_worker_finds_the_chip_of_its_own_gpu() -> None:
    first, second = worker_settings(parse("m", "--device", "hip:gfx942"), [1, 2], [], [])
    assert first["device"] == second["device"] == "hip"


@given(st.integers(1, 6), st.integers(1, 4))
def test_devices_are_dealt_out_in_order_and_evenly(num_workers: int, stages: int) -> None:
    ids = [str(index) for index in range(num_workers * stages)]
    config = parse("m", "--device", "hip", "--device-ids", *ids)
    dealt = dealt_devices(config, num_workers)
    assert [device for each in dealt for device in each] == ids
    assert {len(each) for each in dealt} == {stages}


def test_each_worker_has_a_gpu_of_its_own_by_default() -> None:
    assert dealt_devices(parse("m", "--device", "hip"), 3) == [("0",), ("1",), ("2",)]
    assert dealt_devices(parse("m"), 2) == [(), ()]


def test_devices_that_cannot_be_shared_evenly_are_refused() -> None:
    with pytest.raises(ServerConfigError, match="names 3 devices, which 2 workers cannot share"):
        dealt_devices(parse("m", "--device", "hip", "--device-ids", "0", "1", "2"), 2)


@pytest.mark.parametrize(
    "flags",
    [
        ["--root-path", "/x"],
        ["--drain-delay", "3"],
        ["--kv-events-endpoint", "tcp://127.0.0.1:5557"],
        ["--gateway-key", "k"],
    ],
)
def test_what_no_router_can_do_is_refused(flags: list[str]) -> None:
    with pytest.raises(ServerConfigError, match=f"`{flags[0]}` is not for clusters"):
        check(parse("m", *flags))
