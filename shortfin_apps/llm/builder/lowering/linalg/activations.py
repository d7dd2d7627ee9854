"""The activations of gated feed-forwards."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.linalg.bodies import activate, clamped_swiglu, yield_as
from shortfin_apps.llm.model.operations import Activation


def gated(e: Emitter, gate: Tensor, up: Tensor, activation: Activation, dtype: str) -> Tensor:
    """Compute activation(gate) * up for f32 matrices, and convert the result to `dtype`."""
    if activation == "clamped":
        clamped = clamped_swiglu("%y", "%a", "%b")
        body = f"{clamped}\n{yield_as('%y', dtype)}"
        return e.elementwise("td", ("td", gate.shape, dtype), [(gate, "td"), (up, "td")], body)
    body = f"""\
{activate(activation)}
  %y = arith.mulf %active, %b : f32
{yield_as("%y", dtype)}"""
    return e.elementwise("td", ("td", gate.shape, dtype), [(gate, "td"), (up, "td")], body)
