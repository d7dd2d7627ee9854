"""Hand-written kernels: jinja2 templates of MLIR for CPUs, Triton functions for GPUs (triton/).

A kernel's template renders to one `hal.executable.source` with one export, each named like the kernel. A
template takes its sizes from the frozen geometry `g`, defined in the Python file next to the template;
`g.interface` names the operands of the dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jinja2

from shortfin_apps.llm.builder.kernels.interface import pipeline_layout
from shortfin_apps.llm.contract.iree_release import OF_SHORTFIN, compiler_release

Render = Callable[..., str]  # (template, name, **parameters) -> the kernel's name

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader(__name__, "."),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,  # MLIR, not HTML
)


def render(template: str, name: str, **parameters: Any) -> str:
    """Render `template` (a file name without `.mlir.j2`) to MLIR that exports `@name::@name`."""
    return _TEMPLATES.get_template(f"{template}.mlir.j2").render(name=name, **parameters)


def _layout(constants: Sequence[str], reads: Sequence[str], writes: Sequence[str]) -> str:
    """Return the HAL's pipeline layout; the names are only counted, but tell readers what each ordinal is."""
    return pipeline_layout(len(constants), len(reads), len(writes))


def _each(pattern: str, names: Sequence[object]) -> str:
    """Return a comma-separated list of `pattern`, with `#` replaced by each of `names` in turn."""
    return ", ".join(pattern.replace("#", str(name)) for name in names)


def _pairs(rows: int, columns: int) -> list[str]:
    """Return names for a grid of SSA values: 0_0, 0_1, ..., 1_0, ..."""
    return _crossed(range(rows), range(columns))


def _crossed(rows: Sequence[int], columns: Sequence[int]) -> list[str]:
    """Return names for a grid of SSA values with these row and column numbers."""
    return [f"{row}_{column}" for row in rows for column in columns]


# The only syntax that differs between IREE's releases: the type of the alignment of LLVM's masked stores.
_MASKED_ALIGNMENT = "i32" if compiler_release() == OF_SHORTFIN else "i64"

_TEMPLATES.globals |= {
    "layout": _layout,
    "each": _each,
    "pairs": _pairs,
    "crossed": _crossed,
    "masked_alignment": _MASKED_ALIGNMENT,
}
