"""Checks that all sources share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shortfin_apps.llm.builder.sources.base import check_tensors
from shortfin_apps.llm.builder.sources.random_tiny import RANDOM_SPECS
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.experts import RoutedExperts


def test_experts_of_all_layers_are_counted_before_their_tensors_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name of each would take more memory than any machine has."""
    monkeypatch.delattr("shortfin_apps.llm.builder.sources.base.tensor_shapes")
    experts = RoutedExperts(count=15_000, per_token=1, features=32)
    spec = replace(RANDOM_SPECS["tiny"], num_hidden_layers=4096, experts=experts)
    message = "x: 20000 tensors are too few for 4096 layers and 61440000 experts"
    with pytest.raises(BuildError, match=message):
        check_tensors("x", spec, {f"blk.0.odd.{n}": (1,) for n in range(20_000)})
