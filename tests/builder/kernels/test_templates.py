"""The house rules of kernel templates: short lines, files and macros, and a comment on each macro."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest

from shortfin_apps.llm.builder import kernels

FOLDER = Path(kernels.__file__).parent
TEMPLATES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.mlir.j2"))
MOST_COLUMNS = 120
MOST_LINES = 300
MOST_MACRO_LINES = 80


def violations(lines: list[str]) -> Iterator[str]:
    if len(lines) > MOST_LINES:
        yield f"has {len(lines)} lines"
    starts: list[int] = []
    for number, line in enumerate(lines, 1):
        if len(line) > MOST_COLUMNS:
            yield f"line {number} has {len(line)} columns"
        if line.startswith("{% macro "):
            starts.append(number)
            if "endmacro" not in line and not lines[number - 2].endswith("#}"):
                yield f"line {number}: no comment says what the macro does and reads"
        if "{% endmacro %}" in line or "{%- endmacro %}" in line:
            start = starts.pop()
            if number - start > MOST_MACRO_LINES:
                yield f"line {start}: a macro of {number - start} lines"


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_can_be_read(template: str) -> None:
    lines = (FOLDER / template).read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("{#"), "a header says what the kernel computes"
    assert list(violations(lines)) == []


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["x" * 121], "line 1 has 121 columns"),
        (["x"] * 301, "has 301 lines"),
        (["{# Does. #}", "{% macro a() %}", *["x"] * 80, "{% endmacro %}"], "line 2: a macro of 81 lines"),
        (["", "{% macro a() %}", "{% endmacro %}"], "line 2: no comment says what the macro does and reads"),
    ],
)
def test_a_violation_is_named(lines: list[str], sentence: str) -> None:
    assert list(violations(lines)) == [sentence]


def test_an_unknown_parameter_of_a_template_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        kernels.render("cpu/top_k", "top_k", size=64)
