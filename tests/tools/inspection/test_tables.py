from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.tools.inspection.kernels import GpuCode, Remark
from shortfin_apps.llm.tools.inspection.report import Report, make_report
from shortfin_apps.llm.tools.inspection.subject import open_directory
from shortfin_apps.llm.tools.inspection.tables import tables
from tests.conftest import BuildTiny
from tests.tools.inspection.test_kernels import PLAIN

ENTRY = "decode_bs4"
SPILLS = replace(PLAIN, name=f"{ENTRY}$async_dispatch_0_reduction_4x64_f32", num_vgpr_spills=7)
ALIKE = [
    replace(PLAIN, name=f"{ENTRY}$async_dispatch_{n}_elementwise_4_i64", num_sgprs=n, num_instructions=90 + n)
    for n in (1, 2)
]


@pytest.fixture
def report(build_tiny: BuildTiny) -> Report:
    """A report on two kernels that are alike and one that spills."""
    found = make_report(open_directory(build_tiny(BuildOptions()).vmfb.parent))
    launches = {SPILLS.name: 3, ALIKE[0].name: 10, ALIKE[1].name: 20}
    entry = next(entry for entry in found.entries if entry.name == ENTRY)
    entry = replace(entry, launches=launches, num_dispatches=33)
    return replace(found, entries=(entry,), code=GpuCode("gfx942", ((*ALIKE, SPILLS),)))


def printed(report: Report, *, show_all: bool) -> str:
    console = Console(width=180)
    with console.capture() as capture:
        console.print(*tables(report, show_all=show_all), sep="\n", highlight=False, markup=False)
    return capture.get()


def cells(text: str, first: str) -> list[str]:
    """The columns of the row whose first is that."""
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line
    ]
    (row,) = [row for row in rows if row[0] == first]
    return row


def test_kernels_with_remarks_are_shown(report: Report) -> None:
    text = printed(report, show_all=False)
    row = cells(text, "reduction_4x64_f32")
    assert row == [
        *(
            "reduction_4x64_f32",
            "1",
            "3",
            "64x1x1",
            "40",
            "",
            "20",
            "7",
            "",
            "",
            "8",
            "4",
            "3x16, 3x2",
            "100",
        ),
        "spills",
    ]
    assert "elementwise_4_i64" not in text
    assert "2 kernels without a remark are not shown" in text
    assert Remark.SPILLS.meaning in text
    assert Remark.SCRATCH.meaning not in text
    assert cells(text, ENTRY)[-2:] == ["33", "3 spills"]
    assert cells(text, ENTRY)[2:7] == ["static", "4", "1", "7.4 kB", "by call"]


def test_all_kernels_are_shown_with_equal_ones_in_one_row(report: Report) -> None:
    text = printed(report, show_all=True)
    row = cells(text, "elementwise_4_i64")
    assert row[1:3] == ["2", "30"]
    assert "1-2" in row
    assert "91-92" in row
    assert "not shown" not in text
    assert text.index("reduction_4x64_f32") < text.index("elementwise_4_i64")


def test_unknown_launches_are_not_guessed(report: Report) -> None:
    (entry,) = report.entries
    unknown = replace(report, entries=(replace(entry, launches=None, num_dispatches=None),))
    text = printed(unknown, show_all=False)
    assert cells(text, "reduction_4x64_f32")[2] == "?"
    assert cells(text, ENTRY)[-1] == "?"


def test_the_overview_has_sizes(report: Report) -> None:
    text = printed(report, show_all=False)
    assert "bfloat16, 256 bytes a token; 513 pages of 16 tokens, 2.1 MB" in text
    assert "1,024 tokens" in text
    assert "random:tiny" in text
