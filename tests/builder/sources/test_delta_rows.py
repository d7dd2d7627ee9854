"""The order of a gated delta net's rows in tensors that hold several projections."""

from __future__ import annotations

import numpy as np
import pytest

from shortfin_apps.llm.builder.sources.delta_rows import delta_row_order
from shortfin_apps.llm.model.delta_net import DeltaNet

NET = DeltaNet(layers=(0,), key_heads=2, value_heads=4, key_dim=1, value_dim=1)


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
