from __future__ import annotations

import pytest

from tests.serving.engine_link.border_schedule import BorderSchedule

SEEDS = 400
BATCH = 40


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_faults_over_the_border_harm_nobody_else(first: int) -> None:
    """Requests of other links get exactly their tokens, and every page comes back, whatever link is cut."""
    for seed in range(first, first + BATCH):
        try:
            BorderSchedule(seed).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
