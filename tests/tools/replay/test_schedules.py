from __future__ import annotations

from shortfin_apps.llm.components.batching import BATCH_MODES
from shortfin_apps.llm.tools.replay.schedules import SCHEDULES
from tests.components.fake_device import fake_config


def test_every_mode_computes_alone_and_in_a_full_batch_and_after_preemptions() -> None:
    for mode in BATCH_MODES:
        kinds = {(s.fills_batch, s.preempts) for s in SCHEDULES.values() if s.mode == mode}
        assert kinds >= {(False, False), (True, False), (False, True)}


def test_chunks_are_a_page_only_where_that_is_said() -> None:
    config = fake_config(stride=4)
    for schedule in SCHEDULES.values():
        options = schedule.mode_options(config)
        assert options.chunk_tokens == (4 if schedule.is_chunked else None)
        assert options.batch_mode == schedule.mode
