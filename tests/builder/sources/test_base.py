"""Checks that all sources share."""

from __future__ import annotations

import numpy as np
import pytest

from shortfin_apps.llm.builder.sources.base import check_tensors, delta_row_order
from shortfin_apps.llm.builder.sources.random_tiny import RANDOM_SPECS
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.delta_net import DeltaNet
from shortfin_apps.llm.model.feed_forward import MoE
from tests.builder.specs import changed, with_experts


def test_experts_of_all_layers_are_counted_before_their_tensors_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name of each would take more memory than any machine has."""
    monkeypatch.delattr("shortfin_apps.llm.builder.sources.base.tensor_shapes")
    experts = MoE(count=15_000, per_token=1, features=32)
    spec = with_experts(changed(RANDOM_SPECS["tiny"], layers=4096), experts)
    message = "x: 20000 tensors are too few for 4096 layers and 61440000 experts"
    with pytest.raises(BuildError, match=message):
        check_tensors("x", spec, {f"blk.0.odd.{n}": (1,) for n in range(20_000)})


NET = DeltaNet(key_heads=2, value_heads=4, key_dim=1, value_dim=1)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        # Of each key head q, k, two of v and two of gates.
        ("blk.0.ssm_in.weight", [0, 6, 1, 7, 2, 3, 8, 9, 4, 5, 10, 11]),
        ("blk.0.ssm_ba.weight", [0, 1, 4, 5, 2, 3, 6, 7]),
    ],
)
def test_rows_are_ordered_by_projection(name: str, order: list[int]) -> None:
    np.testing.assert_array_equal(delta_row_order(NET, name), order)


def test_other_tensors_have_their_order() -> None:
    assert delta_row_order(NET, "blk.0.attn_qkv.weight") is None
