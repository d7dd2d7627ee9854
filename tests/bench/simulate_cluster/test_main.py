from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.simulate_cluster.__main__ import HELP, main, parse
from bench.simulate_cluster.workload import WorkloadOptions


def test_a_table_for_each_figure_and_the_same_cells_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cells.json"
    flags = ["--workers=1,2", "--policies=round robin,cache aware", "--duration-s=20", "--jobs=1"]
    main([*flags, f"--json={out}"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| round robin |") for line in lines) == 3
    cells = json.loads(out.read_text())
    assert [(cell["policy"], cell["workers"]) for cell in cells] == [
        ("round robin", 1),
        ("round robin", 2),
        ("cache aware", 1),
        ("cache aware", 2),
    ]
    assert f"| round robin | {cells[0]['hit_rate']:.3f} | {cells[1]['hit_rate']:.3f} |" in lines
    assert cells[0]["hit_rate"] == cells[2]["hit_rate"]  # of one worker no policy has a choice
    assert cells[0]["requests"] > 5 * 2.5 * 10  # of one worker 30 runs are counted


def test_help_says_what_every_option_of_the_workload_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(HELP) == set(WorkloadOptions.__dataclass_fields__)
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    assert "--prefix-tokens" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--workers=0", "--policies=sticky", "--workers=many"])
def test_what_cannot_be_simulated_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([flag])
    assert ended.value.code == 2
    assert flag.split("=")[0] in capsys.readouterr().err
