"""Row orders of a gated delta net's fused tensors, which store projections key head by key head."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.model.delta_net import DeltaNet


def delta_row_order(net: DeltaNet, name: str) -> npt.NDArray[np.intp] | None:
    """Return the source's row index of each row of a fused tensor, by projection; None for other tensors."""
    sharing = net.value_heads // net.key_heads
    if name.endswith(".ssm_in.weight"):  # q, k, v and gates
        values = sharing * net.value_dim
        return _by_part(net.key_heads, (net.key_dim, net.key_dim, values, values))
    return _by_part(net.key_heads, (sharing, sharing)) if name.endswith(".ssm_ba.weight") else None


def _by_part(heads: int, sizes: tuple[int, ...]) -> npt.NDArray[np.intp]:
    """Return the indices, part by part, of rows stored as `heads` times parts of the given `sizes`."""
    rows = np.arange(heads * sum(sizes)).reshape(heads, -1)
    parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    return np.concatenate([part.reshape(-1) for part in parts])
