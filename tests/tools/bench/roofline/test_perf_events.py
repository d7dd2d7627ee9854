from __future__ import annotations

import threading
import time

import pytest

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.tools.bench.roofline.perf_events import PERIOD_NS, Sampler, sampling


def test_there_is_one_sample_per_period() -> None:
    try:
        with sampling() as addresses:
            begin = time.process_time_ns()
            while time.process_time_ns() - begin < 400 * PERIOD_NS:
                pass
    except InvalidRequestError as error:
        pytest.skip(str(error))
    assert 300 < len(addresses) < 600
    assert all(addresses)


def test_an_idle_process_has_almost_no_samples() -> None:
    """Opening and closing takes time itself, the more the more threads other tests have left."""
    begin_ns = time.process_time_ns()
    try:
        with sampling() as addresses:
            pass
    except InvalidRequestError as error:
        pytest.skip(str(error))
    assert len(addresses) < 50 + (time.process_time_ns() - begin_ns) / PERIOD_NS


def test_an_ended_thread_is_not_a_permission_error() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread.native_id is not None
    try:
        with sampling():
            pass
    except InvalidRequestError as error:
        pytest.skip(str(error))
    with pytest.raises(ProcessLookupError):
        Sampler().open(thread.native_id)
