"""Lists of cases, of which `make test` or `make amd` runs a few and `make slow` others; pairs of three."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def slow_but(quick: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters of pytest; those that are not among the `quick` ones are slow.

    A tuple is one parameter: for several names, see `slow_rows_but`.
    """
    chosen = list(quick)
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def slow_rows_but(quick: Iterable[tuple[Any, ...]], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """As `slow_but`, of cases that have a value for each of several names."""
    chosen = list(quick)
    return [case if case in chosen else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def every_pair(
    rows: Sequence[Any], columns: Sequence[Any], layers: Sequence[Any]
) -> list[tuple[Any, Any, Any]]:
    """Each row with each column, in one of the layers, so that each of these is with each layer, too.

    There are at least as many rows and columns as layers.
    """
    places = product(range(len(rows)), range(len(columns)))
    return [(rows[row], columns[column], layers[(row + column) % len(layers)]) for row, column in places]
