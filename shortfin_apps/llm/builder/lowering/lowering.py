"""Emit a model's operations, each with the kernel chosen for it (see choose.py).

Kernels are grouped in classes. A class that handles a kind of operation has its method:

    Embed        embed(e, tokens, weight) -> Tensor
    Norm         rms_norm(e, x, weight) -> Tensor, or an operand that the same class's matmuls accept
    AddNormed    add_normed(e, x, weight, residual) -> Tensor
    Linear       linear(e, x, weight, residual or None) -> Tensor
    GatedLinear  gated_linear(e, x, weight, activation) -> Tensor
    Route        route(e, logits, batch) -> the `routing` operand of the same class's experts
    GatedExperts gated_experts(e, x, weight, bias or None, routing) -> Tensor
    SumExperts   sum_experts(e, x, weight, bias or None, routing, residual) -> Tensor
    Attend       attend(e, operation, qkv, batch) -> Tensor
    DeltaRule    delta_rule(e, operation, x, rates, batch) -> Tensor
    LastTokens   last_tokens(e, x, batch) -> Tensor
    TopK         top_k(e, logits) -> two Tensors
    Sample       sample(e, values, indices, logits, state) -> Tensor, LoopState
    another      compute(e, operation, values) -> Tensor

Shapes and types are in model/operations.py. Each method may be called in several functions of the module. A
`FusedKernels` class handles runs of operations instead, each in one dispatch. A class with `sample` and
`draws_rows` samples full rows (NO_TOP_K) in loops, and also has methods for rows that another function left
on the device:

    draw_rows(e, rows) -> Tensor
    adjust(e, rows) -> Tensor, the adjusted logits, from which the class with `top_k` selects the best
    draw_adjusted(e, values, indices, logits, rows) -> Tensor
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.graph.rotary import Rotary
from shortfin_apps.llm.builder.kernels import render
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.model.attention import Attend
from shortfin_apps.llm.model.config import context_length
from shortfin_apps.llm.model.delta_net import DeltaRule
from shortfin_apps.llm.model.feed_forward import GatedExperts, MoE, Route, SumExperts
from shortfin_apps.llm.model.operations import (
    AddNormed,
    Embed,
    GatedLinear,
    LastTokens,
    Linear,
    Norm,
    Operation,
    PagedOperation,
    Sample,
    TopK,
)
from shortfin_apps.llm.model.rope import Rope, Rotation
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec

Prepare = Callable[[Emitter, Batch], None]


class RenderedKernels:
    """The module's hand-written kernels, each rendered or compiled once."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._origins: dict[str, object] = {}

    def render(self, template: str, name: str, **parameters: Any) -> str:
        """Render `template` as the kernel `name`, unless it exists; a name stands for one kernel."""
        return self.add(name, (template, parameters), lambda: render(template, name, **parameters))

    def add(self, name: str, origin: object, make: Callable[[], str]) -> str:
        """Add the text returned by `make` as the kernel `name`, unless it exists.

        `origin` is everything that the text depends on; a name must always have the same origin.
        """
        if name not in self.texts:
            self.texts[name] = make()
            self._origins[name] = origin
        assert self._origins[name] == origin, f"{name} names two kernels"
        return name


@dataclass(frozen=True, slots=True)
class LoweringContext:
    """The inputs to the choice of kernels and to the kernels."""

    spec: ModelSpec
    options: BuildOptions
    target: Target
    weights: WeightTypes
    rendered: RenderedKernels = field(default_factory=RenderedKernels)

    @property
    def rotaries(self) -> dict[Rotation, Rotary]:
        """The rotary tables of each rotation in the model."""
        length = context_length(self.spec, self.options)
        # Kernels that prepare a batch compute at least one, even if no layer rotates.
        rotating = [each for each in self.spec.rotations if each.rope is not None]
        made = rotating or [replace(self.spec.attention.rotation, rope=Rope())]
        return {rotation: Rotary(rotation, length) for rotation in made}

    @property
    def experts(self) -> MoE:
        """The model's experts, for their kernels."""
        assert self.spec.experts
        return self.spec.experts

    @property
    def render(self) -> Callable[..., str]:
        return self.rendered.render


class Kernels:
    """The base of a class of kernels: what kernels read of the context."""

    def __init__(self, context: LoweringContext) -> None:
        self._spec = context.spec
        self._options = context.options
        self._target = context.target
        self._weights = context.weights
        self._render = context.render


class Values:
    """The values of one function by name, and the batch of its tokens if it has one."""

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
        """Return a tensor, or a norm that the consuming matmul computes."""
        return self._values[name]

    def tensors(self, names: set[str]) -> dict[str, Tensor]:
        """Return the named values, in the order in which they were first written."""
        return {name: self[name] for name in self._values if name in names}


@dataclass(frozen=True, slots=True)
class LoopState:
    """The state that a decode loop keeps on the device.

    Every step advances `tokens` and `positions` [rows] i64; `sampling` is [fields, rows] i64.
    """

    tokens: Tensor
    positions: Tensor
    sampling: Tensor


@dataclass(frozen=True, slots=True)
class LeftRows:
    """Rows of an entry's results and their sampling parameters: the arguments of a `sample_bs{N}`.

    Values and logits keep the shape of the argument, as IREE would copy them to reshape them.
    """

    values: Tensor  # [any, 1, K] f32
    logits: Tensor  # [any, 1, vocab] f32
    row_indices: Tensor  # [rows] i64
    positions: Tensor  # [rows] i64
    sampling: Tensor  # [fields, rows] i64


@dataclass(frozen=True, slots=True)
class AdjustedRows:
    """Rows with adjustments to apply before sampling: the arguments of an `adjusted_sample_bs{N}`."""

    logits: Tensor  # [any, 1, vocab] f32
    row_indices: Tensor  # [rows] i64
    positions: Tensor  # [rows] i64
    sampling: Tensor  # [fields, rows] i64
    penalties: Tensor  # [fields, rows] f32
    edits: Tensor  # [fields, any] i32
    allowed: Tensor  # [any, words] i32
    allowed_indices: Tensor  # [rows] i64


class FusedKernels(Protocol):
    """Kernels that each compute a run of operations."""

    def takes(self, operations: Sequence[Operation], values: Values) -> int:
        """Return how many leading operations are lowered together; 0 if the first is not supported."""
        ...

    def lower(self, e: Emitter, run: Sequence[Operation], values: Values, results: Sequence[str]) -> None:
        """Emit the run; it writes `results` for later operations and keeps all other values internal."""
        ...


class Lowering:
    """The kernels of a module by kind of operation, and optional `fused` kernels for runs.

    `prepare` emits the batch data that kernels need, once, before any operation that reads the batch. The
    default emits nothing, for callers with complete batches.
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
        """Whether tokens are drawn from full rows on the device."""
        return bool(self._kernels[Sample].draws_rows)

    def draw_rows(self, e: Emitter, rows: LeftRows) -> Tensor:
        """Draw a token from each full row, [rows] i64; NOT_FINITE if the row's best logit is not finite."""
        token_ids = self._kernels[Sample].draw_rows(e, rows)
        assert isinstance(token_ids, Tensor)
        return token_ids

    def draw_adjusted_rows(self, e: Emitter, rows: AdjustedRows) -> Tensor:
        """Draw tokens like `draw_rows` after the rows' adjustments, [rows] i64."""
        logits = self._kernels[Sample].adjust(e, rows)
        best = self._kernels[TopK].top_k(e, logits)
        token_ids = self._kernels[Sample].draw_adjusted(e, *best, logits, rows)
        assert isinstance(token_ids, Tensor)
        return token_ids

    def declarations(self) -> list[str]:
        """Return the executables that the operations emitted so far dispatch."""
        return list(self._rendered.texts.values())

    def lower(
        self, e: Emitter, operations: Sequence[Operation], values: Values, results: Sequence[str]
    ) -> None:
        """Emit `operations`, which read and write `values`; `results` names the values the caller needs."""
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
            case Linear():
                residual = values[operation.residual] if operation.residual else None
                values[operation.out] = kernels.linear(e, x, operation.weight, residual)
            case GatedLinear():
                values[operation.out] = kernels.gated_linear(e, x, operation.weight, operation.activation)
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
                values[operation.out] = kernels.attend(e, operation, x, values.batch)
            case DeltaRule():
                values[operation.out] = kernels.delta_rule(
                    e, operation, x, values[operation.rates], values.batch
                )
            case LastTokens():
                values[operation.out] = kernels.last_tokens(e, x, values.batch)
            case TopK():
                values[operation.out], values[operation.indices] = kernels.top_k(e, x)
            case Sample():
                state = LoopState(
                    *(values[n] for n in (operation.tokens, operation.positions, operation.sampling))
                )
                row = values[operation.indices], values[operation.logits]
                values[operation.out], state = kernels.sample(e, x, *row, state)
                values[operation.tokens], values[operation.positions] = state.tokens, state.positions
            case _:
                values[operation.out] = kernels.compute(e, operation, values)


def _turn(run: Sequence[Operation], values: Values) -> None:
    """Select the batch's slab for the attention, state or routing in `run`, which has at most one."""
    for operation in run:
        if isinstance(operation, PagedOperation):
            values.batch.turn_to(operation.layer, operation.rotation)
        elif isinstance(operation, Route):
            values.batch.turn_to_all_tokens()


def _live(run: Sequence[Operation], rest: Sequence[Operation], results: Sequence[str]) -> list[str]:
    """List the values that `run` writes and `rest` or the caller reads, in the order of the run."""

    def is_read(name: str) -> bool:
        for operation in rest:
            if name in operation.reads:
                return True
            if name in operation.writes:
                return False
        return name in results

    return [name for name in dict.fromkeys(name for o in run for name in o.writes) if is_read(name)]
