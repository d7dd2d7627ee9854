"""Writes a small SVG plot without a library: lines over two logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 640, 400, 60  # pixels; the margin is on every side
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd")


@dataclass(frozen=True, slots=True)
class Line:
    """Points (x, y) in ascending order of x, all positive."""

    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Axis:
    """A logarithmic axis from `low` at pixel `begin` to `high` at pixel `end`."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.begin + share * (self.end - self.begin)


def write_plot(path: Path, title: str, lines: Sequence[Line]) -> None:
    path.write_text("\n".join(_svg(title, lines)) + "\n", encoding="utf-8")


def _svg(title: str, lines: Sequence[Line]) -> Iterator[str]:
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points]
    decades = [
        10.0**power for power in range(math.floor(math.log10(min(ys))), 1 + math.ceil(math.log10(max(ys))))
    ]
    across = _Axis(min(xs) / 1.2, max(xs) * 1.2, MARGIN, WIDTH - MARGIN)
    up = _Axis(decades[0], max(decades[-1], decades[0] * 10), HEIGHT - MARGIN, MARGIN)
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    yield _text(MARGIN, MARGIN / 2, title, 14)
    for x in xs:
        yield _text(across(x), HEIGHT - MARGIN + 18, f"{x:g}", 11, "middle")
    for y in decades:
        yield f'<path d="M{MARGIN} {up(y):.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>'
        yield _text(MARGIN - 6, up(y) + 4, f"{y:,.0f}", 11, "end")
    for index, line in enumerate(lines):
        colour = COLOURS[index % len(COLOURS)]
        path = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in line.points)
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield _text(MARGIN + 10, MARGIN + 16 * (index + 1), line.label, 12, colour=colour)
    yield "</svg>"


def _text(x: float, y: float, text: str, size: int, anchor: str = "start", colour: str = "black") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
