"""Parts of the bodies of linalg operations, in MLIR, and the operation of gated activations."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.epilogue import CLAMPED_LIMIT, CLAMPED_SLOPE
from shortfin_apps.llm.model.operations import Activation

_GELU_SLOPE = 1.5957691216057308  # 2 * sqrt(2 / pi)


def yield_as(value: str, dtype: str) -> str:
    """Return MLIR that converts the f32 `value` to `dtype` and yields it, as the end of a body."""
    if dtype == "f32":
        return f"  linalg.yield {value} : f32"
    return f"  %narrow = arith.truncf {value} : f32 to {dtype}\n  linalg.yield %narrow : {dtype}"


def activate(activation: Activation) -> str:
    """Return MLIR that sets %active f32 to silu or gelu of %a.

    silu is %a * sigmoid(%a). gelu's tanh approximation is %a * sigmoid(a cubic polynomial of %a), as
    (1 + tanh(x)) / 2 = sigmoid(2 x).
    """
    slope = f"""\
  %slope = arith.constant {_GELU_SLOPE:.9e} : f32
  %bend = arith.constant {_GELU_SLOPE * 0.044715:.9e} : f32
  %square = arith.mulf %a, %a : f32
  %steep = math.fma %square, %bend, %slope : f32
  %inner = arith.mulf %a, %steep : f32
  %negative = arith.negf %inner : f32"""
    return f"""\
  %one = arith.constant 1.0 : f32
{"  %negative = arith.negf %a : f32" if activation == "silu" else slope}
  %power = math.exp %negative : f32
  %divisor = arith.addf %power, %one : f32
  %active = arith.divf %a, %divisor : f32"""


def clamped_swiglu(result: str, gate: str, up: str) -> str:
    """Return MLIR that sets `result` f32 to the Activation "clamped" of the f32 `gate` and `up`."""
    return f"""\
  %slope = arith.constant {-CLAMPED_SLOPE:.9e} : f32
  %most = arith.constant {CLAMPED_LIMIT:.9e} : f32
  %least = arith.constant {-CLAMPED_LIMIT:.9e} : f32
  %one = arith.constant 1.0 : f32
  %gate = arith.minimumf {gate}, %most : f32
  %steep = arith.mulf %gate, %slope : f32
  %power = math.exp %steep : f32
  %divisor = arith.addf %power, %one : f32
  %active = arith.divf %gate, %divisor : f32
  %low = arith.minimumf {up}, %most : f32
  %up = arith.maximumf %low, %least : f32
  %more = arith.addf %up, %one : f32
  {result} = arith.mulf %active, %more : f32"""


def capped(result: str, value: str, cap: float) -> str:
    """Return MLIR that sets `result` to cap * tanh(value / cap), in f32."""
    name = result.removeprefix("%")
    return f"""\
  %{name}.cap = arith.constant {cap:.9e} : f32
  %{name}.share = arith.divf {value}, %{name}.cap : f32
  %{name}.tanh = math.tanh %{name}.share : f32
  {result} = arith.mulf %{name}.tanh, %{name}.cap : f32"""


def reaches(result: str, slot: str, start: str, seq_len: str, window: int | None) -> str:
    """Return MLIR that sets `result` i1: whether any new token of a sequence attends to `slot`.

    These tokens are at positions `start` (i64) to `seq_len` - 1; `slot` and `seq_len` have type index.
    """
    if window is None:
        return f"  {result} = arith.cmpi ult, {slot}, {seq_len} : index"
    return f"""\
  {result}.begun = arith.cmpi ult, {slot}, {seq_len} : index
  {result}.start = arith.index_cast {start} : i64 to index
  {result}.window = arith.constant {window} : index
  {result}.reach = arith.addi {slot}, {result}.window : index
  {result}.near = arith.cmpi ugt, {result}.reach, {result}.start : index
  {result} = arith.andi {result}.begun, {result}.near : i1"""


def sees(result: str, slot: str, position: str, window: int | None) -> str:
    """Return MLIR that sets `result` i1: whether the token at `position` attends to `slot`.

    `position` and `slot` have type index. A token attends to slots up to its position; with a `window`, only
    to the last `window` of these.
    """
    if window is None:
        return f"  {result} = arith.cmpi ule, {slot}, {position} : index"
    return f"""\
  {result}.begun = arith.cmpi ule, {slot}, {position} : index
  {result}.window = arith.constant {window} : index
  {result}.reach = arith.addi {slot}, {result}.window : index
  {result}.near = arith.cmpi ugt, {result}.reach, {position} : index
  {result} = arith.andi {result}.begun, {result}.near : i1"""


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
