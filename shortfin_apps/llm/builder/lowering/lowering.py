"""Walks a model's operations and emits each by the kernel chosen for it (see choose.py).

Kernels are grouped in classes; one that takes a kind of operation has the method for it:

    Embed        embed(e, tokens, weight) -> Tensor
    Norm         rms_norm(e, x, weight) -> Tensor, or what the same class's matmuls take in its place
    AddNormed    add_normed(e, x, weight, residual) -> Tensor
    Narrow       narrow(e, x) -> Tensor
    Linear       linear(e, x, weight, residual or None) -> Tensor
    AddBias      add_bias(e, x, weight) -> Tensor
    NormHeads    norm_heads(e, x, weight) -> Tensor
    NormWhole    norm_whole(e, x, weight) -> Tensor
    GatedLinear  gated_linear(e, x, weight) -> Tensor
    Route        route(e, logits, batch) -> what the same class's experts take as `routing`
    GatedExperts gated_experts(e, x, weight, bias or None, routing) -> Tensor
    SumExperts   sum_experts(e, x, weight, bias or None, routing, residual) -> Tensor
    Attend       attend(e, qkv, layer, batch) -> Tensor
    DropGates    drop_gates(e, x) -> Tensor
    Gate         gate(e, x, gates) -> Tensor
    GateTokens   gate_tokens(e, x, gates) -> Tensor
    DeltaRule    delta_rule(e, operation, x, rates, batch) -> Tensor
    LastTokens   last_tokens(e, x, batch) -> Tensor
    CapLogits    cap_logits(e, logits) -> Tensor
    TopK         top_k(e, logits) -> two Tensors
    Sample       sample(e, values, indices, logits, state) -> Tensor, LoopState

Shapes and types are in model/operations.py. Each may be called in several functions of the module. A
`FusedKernels` class takes runs of operations instead, each run in one dispatch. A class with `sample` that
`draws_rows`, in loops by NO_TOP_K, also has for rows that another function has left:

    draw_rows(e, rows) -> Tensor
    adjust(e, rows) -> Tensor, the adjusted logits, whose best the class with `top_k` finds
    draw_adjusted(e, values, indices, logits, rows) -> Tensor
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.graph.rotary import Rotary
from shortfin_apps.llm.builder.kernels import render
from shortfin_apps.llm.builder.model.config import context_length
from shortfin_apps.llm.builder.model.operations import (
    AddBias,
    AddNormed,
    Attend,
    CapLogits,
    DeltaRule,
    DropGates,
    Embed,
    Gate,
    GatedExperts,
    GatedLinear,
    GateTokens,
    LastTokens,
    Linear,
    Narrow,
    Norm,
    NormHeads,
    NormWhole,
    Operation,
    Route,
    Sample,
    SumExperts,
    TopK,
)
from shortfin_apps.llm.builder.model.rope import Rotation
from shortfin_apps.llm.builder.model.spec import BuildOptions, ModelSpec
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.parameters import WeightTypes

Prepare = Callable[[Emitter, Batch], None]


class RenderedKernels:
    """The module's hand-written kernels, each rendered or compiled once."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._origins: dict[str, object] = {}

    def render(self, template: str, name: str, **parameters: Any) -> str:
        """Renders `template` as the kernel `name`, unless it is there; one name is one kernel."""
        return self.add(name, (template, parameters), lambda: render(template, name, **parameters))

    def add(self, name: str, origin: object, make: Callable[[], str]) -> str:
        """Adds the text that `make` returns as the kernel `name`, unless it is there.

        `origin` is all that the text depends on: one name is one kernel.
        """
        if name not in self.texts:
            self.texts[name] = make()
            self._origins[name] = origin
        assert self._origins[name] == origin, f"{name} names two kernels"
        return name


@dataclass(frozen=True, slots=True)
class LoweringContext:
    """The inputs of the choice of kernels, and of the kernels."""

    spec: ModelSpec
    options: BuildOptions
    target: Target
    weights: WeightTypes
    rendered: RenderedKernels = field(default_factory=RenderedKernels)

    @property
    def rotaries(self) -> dict[Rotation, Rotary]:
        """Of each way in which layers rotate, its tables."""
        length, ways = context_length(self.spec, self.options), (Rotation.GLOBAL, *self.spec.rotations)
        return {way: Rotary(self.spec, length, way) for way in ways if way is not Rotation.NONE}

    @property
    def render(self) -> Callable[..., str]:
        return self.rendered.render


class Values:
    """The values of one function by name, and the batch that its tokens belong to, if it has one."""

    def __init__(self, values: Mapping[str, Tensor], batch: Batch | None = None) -> None:
        self._values: dict[str, Any] = dict(values)
        self._batch = batch

    @property
    def batch(self) -> Batch:
        assert self._batch is not None
        return self._batch

    def __getitem__(self, name: str) -> Tensor:
        value = self._values[name]
        assert isinstance(value, Tensor), name
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def operand(self, name: str) -> Any:
        """A tensor, or a norm that a matmul computes on its way in."""
        return self._values[name]

    def tensors(self, names: set[str]) -> dict[str, Tensor]:
        """The named values, in the order in which they were first written."""
        return {name: self[name] for name in self._values if name in names}


@dataclass(frozen=True, slots=True)
class LoopState:
    """What a decode loop keeps on the device: `tokens` and `positions` [rows] i64, which every step advances,
    and `sampling` [fields, rows] i64."""

    tokens: Tensor
    positions: Tensor
    sampling: Tensor


@dataclass(frozen=True, slots=True)
class LeftRows:
    """Rows of an entry's results, and how tokens are drawn from them: the arguments of a `sample_bs{N}`.

    Values and logits have the shape of an argument, as IREE would copy them to reshape them.
    """

    values: Tensor  # [any, 1, K] f32
    logits: Tensor  # [any, 1, vocab] f32
    row_indices: Tensor  # [rows] i64
    positions: Tensor  # [rows] i64
    sampling: Tensor  # [fields, rows] i64


@dataclass(frozen=True, slots=True)
class AdjustedRows:
    """Such rows, and how they are adjusted before: the arguments of an `adjusted_sample_bs{N}`."""

    logits: Tensor  # [any, 1, vocab] f32
    row_indices: Tensor  # [rows] i64
    positions: Tensor  # [rows] i64
    sampling: Tensor  # [fields, rows] i64
    penalties: Tensor  # [fields, rows] f32
    edits: Tensor  # [fields, any] i32
    allowed: Tensor  # [any, words] i32
    allowed_indices: Tensor  # [rows] i64


class FusedKernels(Protocol):
    """Kernels that each take a run of operations."""

    def takes(self, operations: Sequence[Operation], values: Values) -> int:
        """How many of the next operations, from the first on, are lowered together; 0 if the first is not."""
        ...

    def lower(self, e: Emitter, run: Sequence[Operation], values: Values, results: Sequence[str]) -> None:
        """Emits the run, which writes `results` for operations after it and all else for itself alone."""
        ...


class Lowering:
    """The kernels of a module, by kind of operation. `fused` are those that take runs, if there are any.

    `prepare` emits what they need of a batch, once and before any operation that reads the batch; nothing
    where callers bring batches that have it.
    """

    def __init__(
        self,
        kernels: Mapping[type[Operation], Any],
        rendered: RenderedKernels,
        fused: FusedKernels | None = None,
        prepare: Prepare = lambda e, batch: None,
    ) -> None:
        self._kernels = kernels
        self._rendered = rendered
        self.prepare = prepare
        self._fused = fused

    @property
    def draws_rows(self) -> bool:
        """Whether tokens are drawn from whole rows on the device."""
        return bool(self._kernels[Sample].draws_rows)

    def draw_rows(self, e: Emitter, rows: LeftRows) -> Tensor:
        """[rows] i64: the token drawn from each whole row, NOT_FINITE where its best logit is not finite."""
        token_ids = self._kernels[Sample].draw_rows(e, rows)
        assert isinstance(token_ids, Tensor)
        return token_ids

    def draw_adjusted_rows(self, e: Emitter, rows: AdjustedRows) -> Tensor:
        """[rows] i64: the same behind the rows' adjustments."""
        logits = self._kernels[Sample].adjust(e, rows)
        best = self._kernels[TopK].top_k(e, logits)
        token_ids = self._kernels[Sample].draw_adjusted(e, *best, logits, rows)
        assert isinstance(token_ids, Tensor)
        return token_ids

    def declarations(self) -> list[str]:
        """The executables that the operations emitted so far dispatch."""
        return list(self._rendered.texts.values())

    def lower(
        self, e: Emitter, operations: Sequence[Operation], values: Values, results: Sequence[str]
    ) -> None:
        """Emits `operations`, which read and write `values`; those named in `results` are wanted of them."""
        rest = operations
        while rest:
            if self._fused and (length := self._fused.takes(rest, values)):
                run, rest = rest[:length], rest[length:]
                _turn(run, values)
                self._fused.lower(e, run, values, _live(run, rest, results))
            else:
                _turn(rest[:1], values)
                self._lower_one(e, rest[0], values)
                rest = rest[1:]

    def _lower_one(self, e: Emitter, operation: Operation, values: Values) -> None:
        kernels, x = self._kernels[type(operation)], values.operand(operation.x)
        match operation:
            case Embed():
                values[operation.out] = kernels.embed(e, x, operation.weight)
            case Norm():
                values[operation.out] = kernels.rms_norm(e, x, operation.weight)
            case AddNormed():
                added = values[operation.residual]
                values[operation.out] = kernels.add_normed(e, x, operation.weight, added)
            case Narrow():
                values[operation.out] = kernels.narrow(e, x)
            case Linear():
                residual = values[operation.residual] if operation.residual else None
                values[operation.out] = kernels.linear(e, x, operation.weight, residual)
            case AddBias():
                values[operation.out] = kernels.add_bias(e, x, operation.weight)
            case NormHeads():
                values[operation.out] = kernels.norm_heads(e, x, operation.weight)
            case NormWhole():
                values[operation.out] = kernels.norm_whole(e, x, operation.weight)
            case GatedLinear():
                values[operation.out] = kernels.gated_linear(e, x, operation.weight)
            case Route():
                values[operation.out] = kernels.route(e, x, values.batch)
            case GatedExperts():
                routing = values.operand(operation.routing)
                weights = operation.weight, operation.bias
                values[operation.out] = kernels.gated_experts(e, x, *weights, routing)
            case SumExperts():
                routing, residual = values.operand(operation.routing), values[operation.residual]
                weights = operation.weight, operation.bias
                values[operation.out] = kernels.sum_experts(e, x, *weights, routing, residual)
            case Attend():
                values[operation.out] = kernels.attend(e, x, operation.layer, values.batch)
            case DropGates():
                values[operation.out] = kernels.drop_gates(e, x)
            case Gate():
                values[operation.out] = kernels.gate(e, x, values[operation.gates])
            case GateTokens():
                values[operation.out] = kernels.gate_tokens(e, x, values[operation.gates])
            case DeltaRule():
                values[operation.out] = kernels.delta_rule(
                    e, operation, x, values[operation.rates], values.batch
                )
            case LastTokens():
                values[operation.out] = kernels.last_tokens(e, x, values.batch)
            case CapLogits():
                values[operation.out] = kernels.cap_logits(e, x)
            case TopK():
                values[operation.out], values[operation.indices] = kernels.top_k(e, x)
            case Sample():
                state = LoopState(
                    *(values[n] for n in (operation.tokens, operation.positions, operation.sampling))
                )
                row = values[operation.indices], values[operation.logits]
                values[operation.out], state = kernels.sample(e, x, *row, state)
                values[operation.tokens], values[operation.positions] = state.tokens, state.positions


def _turn(run: Sequence[Operation], values: Values) -> None:
    """Readies the batch for the attention, state or routing of `run`, of which it has one at most."""
    for operation in run:
        if isinstance(operation, Attend):
            values.batch.turn_to(operation.layer, operation.rotation)
        elif isinstance(operation, DeltaRule):
            values.batch.turn_to(operation.layer, Rotation.NONE)
        elif isinstance(operation, Route):
            values.batch.turn_to_all_tokens()


def _live(run: Sequence[Operation], rest: Sequence[Operation], results: Sequence[str]) -> list[str]:
    """The values that `run` writes and `rest` or the caller reads, in the order of the run."""

    def is_read(name: str) -> bool:
        for operation in rest:
            if name in operation.reads:
                return True
            if name in operation.writes:
                return False
        return name in results

    return [name for name in dict.fromkeys(name for o in run for name in o.writes) if is_read(name)]
