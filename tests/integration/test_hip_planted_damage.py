"""One lane of an emulated AMD GPU computes exponentials wrong: what notices it, and what does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shortfin_apps.llm.model.spec import BuildOptions
from tests.conftest import BuildTiny
from tests.hip import CHIPS
from tests.integration.damaged_server import Check

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(400)]

OPTIONS = BuildOptions(
    device=f"hip:{CHIPS[0]}",
    prefill_batch_sizes=(1,),
    decode_batch_sizes=(4,),
    extend_sizes=(64,),
    context_length=256,
)
ELSEWHERE = {Check.DIR, Check.DUMP}


def test_a_lane_is_noticed_by_receipts_and_self_tests(build_tiny: BuildTiny, tmp_path: Path) -> None:
    """The same server notices where it packs tokens of several requests: those of one then have other lanes.
    At a start, an error within the tolerance passes; later, other bits than at the start do not.
    """
    directory = build_tiny(OPTIONS).vmfb.parent
    command = [sys.executable, "-m", "tests.integration.broken_lane", str(directory), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = {
        name: {Check(check) for check, is_caught in caught.items() if is_caught}
        for name, (caught, _) in json.loads(run.stdout).items()
    }
    assert found == {
        "sound": set(),
        "sound packed": set(),
        "small": ELSEWHERE,
        "packed": {Check.SAME, *ELSEWHERE},
        "large": {Check.START, *ELSEWHERE},
        "later": {Check.HOURLY, *ELSEWHERE},
    }
