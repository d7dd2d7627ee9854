"""What a worker's limits are is tested where they are used: grammars' trials and chat templates."""

from __future__ import annotations

import pytest

from shortfin_apps.llm.limited_process import LimitedProcess, Limits, arguments_of

pytestmark = pytest.mark.timeout(60)


def test_limits_are_arguments() -> None:
    limits = Limits(cpu_s=1.0, wall_s=2.0, memory_bytes=3)
    assert Limits(*arguments_of(limits)) == limits


def test_a_process_that_ends_at_once_has_no_workers() -> None:
    process = LimitedProcess("shortfin_apps.llm.no_such_module")
    process.process.wait()
    assert process.is_over
    with pytest.raises(OSError, match="pipe"):
        process.new_worker()


def test_closing_ends_the_process_and_its_connections() -> None:
    process = LimitedProcess("shortfin_apps.llm.components.text.template_process", [1.0, 1.0])
    worker = process.new_worker()
    process.idle.append(worker)
    process.close()
    assert process.is_over
    assert worker.fileno() == -1
