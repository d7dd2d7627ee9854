from __future__ import annotations

import time

import pytest

from shortfin_apps.llm.bench.roofline.perf_events import PERIOD_NS, sampling
from shortfin_apps.llm.errors import InvalidRequestError


def test_samples_are_as_many_as_the_processor_time_has_periods() -> None:
    try:
        with sampling() as addresses:
            begin = time.process_time_ns()
            while time.process_time_ns() - begin < 400 * PERIOD_NS:
                pass
    except InvalidRequestError as error:
        pytest.skip(str(error))
    assert 300 < len(addresses) < 600
    assert all(addresses)


def test_an_idle_process_has_next_to_none() -> None:
    try:
        with sampling() as addresses:
            pass
    except InvalidRequestError as error:
        pytest.skip(str(error))
    assert len(addresses) < 50
