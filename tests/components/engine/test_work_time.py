from __future__ import annotations

import gc
import threading

from shortfin_apps.llm.components.engine.mask_costs import MaskCosts
from shortfin_apps.llm.components.engine.work_time import WorkTime, work_time


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def test_collections_are_left_out() -> None:
    clock = Clock()
    work = WorkTime(clock)
    for _ in range(2):
        began_s = work()
        clock.now_s += 1
        work.note("start", {})
        clock.now_s += 5
        work.note("stop", {})
        clock.now_s += 2
        assert work() - began_s == 3


def test_collections_of_other_threads_do_not_count() -> None:
    clock = Clock()
    work = WorkTime(clock)

    def collect() -> None:
        work.note("start", {})
        clock.now_s += 5
        work.note("stop", {})

    other = threading.Thread(target=collect)
    other.start()
    other.join()
    assert work() == 15


def test_grammars_are_charged_for_no_collection() -> None:
    assert work_time.note in gc.callbacks
    assert MaskCosts()._clock is work_time
    total_s = work_time._collections.total_s
    gc.collect()
    assert work_time._collections.total_s > total_s
