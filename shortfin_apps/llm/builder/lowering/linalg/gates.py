"""Gates on attention's result and on shared experts, in linalg, for every target."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.linalg.bodies import yield_as
from shortfin_apps.llm.model.attention import DropGates
from shortfin_apps.llm.model.spec import BuildOptions


class LinalgGates:
    """Kernels of DropGates, Gate and GateTokens."""

    def __init__(self, options: BuildOptions) -> None:
        self._act = options.activations

    def drop_gates(self, e: Emitter, operation: DropGates, x: Tensor) -> Tensor:
        block = operation.block
        body = f"""\
  %t = linalg.index 0 : index
  %d = linalg.index 1 : index
  %queries = arith.constant {block.q_features} : index
  %gate_column = arith.addi %d, %queries : index
  %is_query = arith.cmpi ult, %d, %queries : index
  %column = arith.select %is_query, %d, %gate_column : index
  %value = tensor.extract {x.name}[%t, %column] : {x.type}
  linalg.yield %value : f32"""
        return e.elementwise("td", ("td", (x.shape[0], block.qkv_features), "f32"), [], body)

    def gate(self, e: Emitter, x: Tensor, gates: Tensor) -> Tensor:
        queries = x.shape[1]
        assert isinstance(queries, int)
        return self._times_sigmoid(e, x, e.columns(gates, queries, queries), "td")

    def gate_tokens(self, e: Emitter, x: Tensor, gates: Tensor) -> Tensor:
        return self._times_sigmoid(e, x, gates, "t0")

    def _times_sigmoid(self, e: Emitter, x: Tensor, gates: Tensor, at: str) -> Tensor:
        """Multiply `x` by the sigmoid of `gates`; `at` is the gates' access in loops `td`."""
        wide = "" if x.dtype == "f32" else f"  %wide = arith.extf %a : {x.dtype} to f32\n"
        body = f"""\
{wide}  %one = arith.constant 1.0 : f32
  %negative = arith.negf %b : f32
  %power = math.exp %negative : f32
  %divisor = arith.addf %power, %one : f32
  %y = arith.divf {"%wide" if wide else "%a"}, %divisor : f32
{yield_as("%y", self._act)}"""
        return e.elementwise("td", ("td", x.shape, self._act), [(x, "td"), (gates, at)], body)
