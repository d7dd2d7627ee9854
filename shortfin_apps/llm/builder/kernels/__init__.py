"""Hand-written CPU kernels: one MLIR template per idea, rendered by jinja2.

Each renders to one `hal.executable.source` whose export has the kernel's name. Operands of a dispatch
are the kernel's constants (i32), then its bindings in order: what it reads, what it writes in place, results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jinja2

Render = Callable[..., str]  # (template, name, **parameters) -> the kernel's name

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader(__name__, "."),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,  # it is MLIR, not HTML
)


def render(template: str, name: str, **parameters: Any) -> str:
    """The MLIR text of `template` (a file name without `.mlir.j2`), exported as `@name::@name`."""
    kernel = _TEMPLATES.get_template(f"{template}.mlir.j2")
    return kernel.render(name=name, layout=_layout, each=_each, pairs=_pairs, **parameters)


def _layout(constants: Sequence[str], reads: Sequence[str], writes: Sequence[str]) -> str:
    """A pipeline layout; the names only document what stands at each ordinal."""
    read = "#hal.pipeline.binding<storage_buffer, ReadOnly>"
    write = "#hal.pipeline.binding<storage_buffer>"
    bindings = ", ".join([read] * len(reads) + [write] * len(writes))
    return f"#hal.pipeline.layout<constants = {len(constants)}, bindings = [{bindings}]>"


def _each(pattern: str, names: Sequence[object]) -> str:
    """`pattern` once for every name, which replaces its `#`: a list of values or types."""
    return ", ".join(pattern.replace("#", str(name)) for name in names)


def _pairs(rows: int, columns: int) -> list[str]:
    """Names of a grid of values: 0_0, 0_1, ..., 1_0, ..."""
    return [f"{row}_{column}" for row in range(rows) for column in range(columns)]
