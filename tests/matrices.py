"""Long lists of cases, of which `make test` runs a few and `make check` the others."""

from __future__ import annotations

from collections.abc import Iterable
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
