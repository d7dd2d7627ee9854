"""The geometry of gated delta nets: where a value head has its state."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.builder.kernels.cpu.delta_net import DeltaNetGeometry
from shortfin_apps.llm.model.delta_net import DeltaNet

SIZES = st.integers(1, 40)


@given(
    shared=st.integers(1, 4),
    key_heads=st.integers(1, 4),
    key_dim=SIZES,
    value_dim=SIZES,
    taps=st.integers(2, 5),
)
def test_a_head_holds_past_inputs_and_a_state(
    shared: int, key_heads: int, key_dim: int, value_dim: int, taps: int
) -> None:
    net = DeltaNet(
        key_heads=key_heads,
        value_heads=shared * key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        taps=taps,
    )
    g = DeltaNetGeometry(net=net, layers=3, stride=16, eps=1e-6, dtype="bf16")
    assert g.head_elements == (taps - 1) * (2 * key_dim + value_dim) + key_dim * value_dim
    assert g.head_elements % g.copied == 0, "a copy would end in the next head's state"
    assert g.interface.writes["cache"].shape == ("pages", 3 * net.value_heads * g.head_elements)
    ends = [offset + size for offset, size in g.parts.values()]
    assert [offset for offset, _ in g.parts.values()] == [0, *ends[:-1]]
    assert ends[-1] == net.head_channels
