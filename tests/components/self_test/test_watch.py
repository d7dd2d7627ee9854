from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.sources.random_tiny import SPEC
from shortfin_apps.llm.components.runtime import parameters
from shortfin_apps.llm.components.runtime.memory import empty_bytes
from shortfin_apps.llm.components.self_test.report import Subject
from shortfin_apps.llm.components.self_test.watch import IDLE_S, INTERVAL_S, SelfTestWatch
from shortfin_apps.llm.contract.errors import DeviceLostError, SelfTestError
from tests.components.self_test.compiled import OPTIONS, Built, Miscomputing, Opened, build_model, opened

SMALL = replace(OPTIONS, prefill_batch_sizes=(1,), decode_batch_sizes=(1, 2), chunk_sizes=(), extend_sizes=())
KERNELS = ("Attend: cpu/paged_attention, given a CPU", "Linear: cpu/matmul; not another", "Norm: linalg")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_model(tmp_path, SPEC, SMALL)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[npt.NDArray[np.uint8]]:
    """The parameters in memory, as they are in their files."""
    made: list[npt.NDArray[np.uint8]] = []

    def kept(size: int) -> npt.NDArray[np.uint8]:
        made.append(empty_bytes(size))
        return made[-1]

    monkeypatch.setattr(parameters, "empty_bytes", kept)
    return made


@pytest.fixture
def model(built: Built, memory: list[npt.NDArray[np.uint8]]) -> Iterator[Opened]:
    with opened(built) as model:
        yield model


def watch_of(model: Opened, clock: Clock, *, hourly: bool = True) -> SelfTestWatch:
    subject = Subject(device=model.device.name, identity="abc", kernels=KERNELS)
    return SelfTestWatch(model.self_test, model.locator(), subject, hourly=hourly, clock=clock)


def run_through(watch: SelfTestWatch) -> int:
    """Steps to the end of a run; returns how many there were."""
    runs, steps = watch.num_runs, 0
    while watch.num_runs == runs:
        watch.step()
        steps += 1
    return steps


def report_of(message: str) -> dict[str, object]:
    found = re.search(r"report written to (\S+\.json)", message)
    assert found is not None
    path = Path(found[1])
    report: dict[str, object] = json.loads(path.read_text())
    path.unlink()
    return report


def test_a_run_is_due_after_an_hour_and_a_second_without_requests(model: Opened, clock: Clock) -> None:
    watch = watch_of(model, clock)
    watch.run()
    assert watch.seconds_until_due() == INTERVAL_S
    clock.now_s += INTERVAL_S - 0.5
    assert watch.seconds_until_due() == 0.5
    watch.notice_work()
    assert watch.seconds_until_due() == IDLE_S
    clock.now_s += 1.0
    assert watch.seconds_until_due() == 0.0
    watch.step()
    assert watch.seconds_until_due() == 0.0  # goes on at once
    assert run_through(watch) > 5
    assert (watch.num_runs, watch.num_failures, watch.failure) == (2, 0, None)
    assert watch.seconds_until_due() == INTERVAL_S


def test_only_an_hourly_one_is_due_again(model: Opened, clock: Clock) -> None:
    watch = watch_of(model, clock, hourly=False)
    watch.run()
    clock.now_s += 10 * INTERVAL_S
    assert watch.seconds_until_due() is None


def test_a_request_takes_all_pages_and_the_run_goes_on_where_it_was(model: Opened, clock: Clock) -> None:
    watch = watch_of(model, clock)
    watch.run()
    clock.now_s += INTERVAL_S
    whole = run_through(watch)
    clock.now_s += INTERVAL_S
    for _ in range(whole // 2):
        watch.step()
    watch.notice_work()
    usage = model.cache.usage()
    assert usage.free == usage.total
    assert watch.seconds_until_due() == IDLE_S
    assert run_through(watch) < whole
    assert watch.failure is None


def test_a_flipped_low_bit_in_memory_is_found_by_the_bits(
    built: Built,
    model: Opened,
    memory: list[npt.NDArray[np.uint8]],
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = watch_of(model, clock)
    watch.run()
    [content] = memory
    content[built.offset("output.weight")] ^= 1  # of a bf16's eight bits of precision the lowest
    clock.now_s += INTERVAL_S
    with caplog.at_level(logging.ERROR):
        run_through(watch)
    assert (watch.num_runs, watch.num_failures) == (2, 1)
    assert watch.failure is not None
    assert "computes other bits than it did when the server started" in watch.failure
    assert watch.failure in caplog.text
    assert watch.seconds_until_due() is None
    report_of(watch.failure)


def test_a_flipped_high_bit_fails_the_start_with_a_report(built: Built, clock: Clock) -> None:
    keys = SPEC.attention.q_features * SPEC.hidden_size
    built.flip("blk.0.attn_qkv.weight", 2, keys + 5, 14)
    with opened(built) as model:
        found = r"`prefill_bs1` .*first in layer 0: keys.*cpu/paged_attention"
        with pytest.raises(SelfTestError, match=found) as caught:
            watch_of(model, clock).run()
        usage = model.cache.usage()
        assert usage.free == usage.total
    report = report_of(str(caught.value))
    assert report["artifact"] == "abc"
    assert report["location"] == {"layer": 0, "what": "keys", "than": "the reference"}
    assert isinstance(report["cpu"], str)


def test_a_device_that_miscomputes_is_found(
    built: Built, clock: Clock, model: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Miscomputing(model.device)
    monkeypatch.setattr(model.runner, "_device", wrong)
    watch = watch_of(model, clock)
    watch.run()
    wrong.is_wrong = True
    clock.now_s += INTERVAL_S
    run_through(watch)
    assert watch.failure is not None
    assert "`prefill_bs1` " in watch.failure
    report_of(watch.failure)


def test_a_lost_device_is_no_wrong_model(
    model: Opened, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start the server may be started again; later it has to end."""
    watch = watch_of(model, clock)
    watch.run()
    lost = DeviceLostError("the device has failed for good")

    def fail(*_: object) -> None:
        raise lost

    monkeypatch.setattr(model.device, "upload", fail)
    monkeypatch.setattr(model.device, "clear", fail)
    run_through(watch)
    assert watch.lost_device == str(lost)
    assert watch.failure == f"self-test: the device failed ({lost})"
    with pytest.raises(DeviceLostError, match="failed for good"):
        watch_of(model, clock).run()
