"""Speeds are judged by the chip's row."""

from __future__ import annotations

from typing import Any

import pytest

from shortfin_apps.llm.tools.qualify.bench import Bench, Plan
from shortfin_apps.llm.tools.qualify.outcome import Failed, Fault, Skipped
from shortfin_apps.llm.tools.qualify.speeds import bandwidth, matmul


class Probes:
    def __init__(self, share: float) -> None:
        self.share = share

    def bytes_per_s(self, num_bytes: int) -> float:
        assert num_bytes == 256 << 20  # a quarter of what is spare
        return self.share * 0.256e12

    def flops_per_s(self) -> float:
        return self.share * 59.4e12


class Device:
    name = "hip"

    def spare_bytes(self) -> int:
        return 1 << 30


def bench_of(share: float, *, device: str = "hip:gfx1151") -> Bench:
    bench = Bench(Plan("random:tiny", device))
    vars(bench).update(machine=Probes(share), device=Device())
    return bench


def test_a_slow_clock_is_named_with_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "is_emulated", False)
    with pytest.raises(Failed, match="20% of Radeon 8060S's 256") as caught:
        bandwidth(bench_of(0.2))
    assert caught.value.fault is Fault.SLOW_CLOCK
    assert caught.value.figures["share_of_row"] == pytest.approx(0.2)
    passed = bandwidth(bench_of(0.8))
    assert passed.text == "bandwidth 205 GB/s, 80% of Radeon 8060S's 256"


def test_a_matmul_that_cannot_fill_the_chip_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "is_emulated", False)
    assert matmul(bench_of(0.01)).figures["peak_flops_per_s"] == 59.4e12


def test_an_emulated_gpu_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "is_emulated", True)
    with pytest.raises(Skipped, match="has no clock"):
        bandwidth(bench_of(0.2))


def test_without_a_row_a_speed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "is_emulated", False)
    figures: Any = bandwidth(bench_of(0.01, device="cuda:sm_90")).figures
    assert figures["row_per_s"] is None
