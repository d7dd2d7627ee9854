"""Emit a model's operations, each by the kernel class chosen for it (see choose.py).

A kernel class handles one or more kinds of operations, and has the method of each:

    Embed        embed(e, tokens, weight) -> Tensor
    Norm         rms_norm(e, x, weight) -> Tensor, or an object that the matmuls of the same class accept
    AddNormed    add_normed(e, x, weight, residual) -> Tensor
    Linear       linear(e, x, weight, residual or None) -> Tensor
    GatedLinear  gated_linear(e, x, weight, activation) -> Tensor
    Route        route(e, logits, batch, scores or None) -> the `routing` for the experts of the same class
    GatedExperts gated_experts(e, x, weight, bias or None, routing) -> Tensor
    SumExperts   sum_experts(e, x, weight, bias or None, routing, residual) -> Tensor
    Attend       attend(e, operation, qkv, batch) -> Tensor
    DeltaRule    delta_rule(e, operation, x, rates, batch) -> Tensor
    LastTokens   last_tokens(e, x, batch) -> Tensor
    TopK         top_k(e, logits) -> two Tensors
    Sample       sample(e, rows, state, advances) -> Tensor, DrawState
    any other    compute(e, operation, values) -> Tensor

Shapes and dtypes are in model/operations.py. Each method may be called for several functions of the module. A
`FusedKernels` class instead lowers runs of consecutive operations together. A class with `sample` and
`draws_rows` = True also draws from all logits of a sequence, for requests without top-k (NO_TOP_K), and from
rows that another function left on the device. Such a class has two further methods, for rows of another
function. The class with `top_k` then selects the best of the adjusted logits:

    adjust(e, rows) -> two Tensors, the adjusted logits and the counts
    logprobs(e, rows) -> LogprobTensors

A class with `linear` and `places_logits` = True also has a method that writes a product to given memory:

    linear_into(e, x, weight, memory) -> Tensor
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.graph.rotary import Rotary
from shortfin_apps.llm.builder.kernels import render
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile_all import CompileKernels, compile_here
from shortfin_apps.llm.builder.kernels.ahead_of_time.executable import executable
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel
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
LOGITS_MEMORY = "logits_memory"  # name of the value with the caller's memory for logits, [rows, 1, vocab] f32
_T = TypeVar("_T", "DrawState", "LeftRows", "AdjustedRows", "ChosenRows")


class RenderedKernels:
    """The MLIR of the module's hand-written kernels, by name; each is rendered or compiled once."""

    def __init__(self, compile_kernels: CompileKernels = compile_here) -> None:
        self._compile_kernels = compile_kernels
        self._texts: dict[str, str] = {}
        self._origins: dict[str, object] = {}
        self._waiting: dict[str, tuple[Kernel, Target]] = {}  # kernels that have no text yet

    @property
    def texts(self) -> dict[str, str]:
        """The kernels' MLIR in the order of their first use. Compiles the Triton kernels, all at once."""
        for target in {target for _, target in self._waiting.values()}:
            kernels = [kernel for kernel, each in self._waiting.values() if each == target]
            codes = self._compile_kernels(kernels, target.architecture, target.cpu)
            for kernel, code in zip(kernels, codes, strict=True):
                self._texts[kernel.name] = executable(kernel, code, target.architecture)
        self._waiting.clear()
        return self._texts

    def render(self, template: str, name: str, **parameters: Any) -> str:
        """Render `template` as a kernel, unless it exists; return its name, which is `name` or begins so."""
        name = self._named(name, (template, parameters))
        self.add(name, (template, parameters), lambda: render(template, name, **parameters))
        return name

    def add(self, name: str, origin: object, make: Callable[[], str]) -> None:
        """Add the MLIR that `make` returns as `name`, unless it exists; `origin` decides what it returns."""
        known = self._origins.setdefault(name, origin)
        assert known == origin, f"{name} names two kernels"
        if name not in self._texts:
            self._texts[name] = make()

    def compile(self, kernel: Kernel, target: Target) -> str:
        """Add a Triton kernel, unless it exists, to compile it with the others; return its name."""
        origin = replace(kernel, name="")
        name = self._named(kernel.name, origin)
        self._origins[name] = origin
        if name not in self._texts:
            self._texts[name] = ""  # its place among the kernels
            self._waiting[name] = replace(kernel, name=name), target
        return name

    def _named(self, name: str, origin: object) -> str:
        """Return `name`, with a number if it names a kernel of another `origin`.

        `origin` is everything that the kernel's MLIR depends on. Layers usually share a kernel, but a draft
        layer may have other heads.
        """
        names = (name, *(f"{name}_{number}" for number in range(1, len(self._origins) + 1)))
        return next(each for each in names if self._origins.get(each, origin) == origin)


@dataclass(frozen=True, slots=True)
class LoweringContext:
    """The inputs of the choice of kernels and of the kernel classes."""

    spec: ModelSpec
    options: BuildOptions
    target: Target
    weights: WeightTypes
    rendered: RenderedKernels = field(default_factory=RenderedKernels)

    @property
    def rotaries(self) -> dict[Rotation, Rotary]:
        """The tables of cosines and sines for each rotation in the model."""
        length = context_length(self.spec, self.options)
        # At least one, even if no layer rotates, as kernels that prepare a batch always read tables.
        rotating = [each for each in self.spec.rotations if each.rope is not None]
        made = rotating or [replace(self.spec.attention.rotation, rope=Rope())]
        return {rotation: Rotary(rotation, length) for rotation in made}

    @property
    def experts(self) -> MoE:
        """The model's block of routed experts. Must only be read for models with experts."""
        assert self.spec.experts
        return self.spec.experts

    @property
    def render(self) -> Callable[..., str]:
        return self.rendered.render


class Kernels:
    """The base of kernel classes: keeps the parts of the context that kernels read."""

    def __init__(self, context: LoweringContext) -> None:
        self._spec = context.spec
        self._options = context.options
        self._target = context.target
        self._weights = context.weights
        self._render = context.render


class Values:
    """The values of one function of the module by name, and its batch, if it processes one."""

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

    @property
    def memory_of_logits(self) -> Tensor | None:
        """The value LOGITS_MEMORY; None if there is none."""
        return self._values.get(LOGITS_MEMORY)

    def operand(self, name: str) -> Any:
        """Return a value that may be another object than a Tensor, such as a norm fused into the matmul."""
        return self._values[name]

    def tensors(self, names: set[str]) -> dict[str, Tensor]:
        """Return the values with these names, in the order in which the names were first written."""
        return {name: self[name] for name in self._values if name in names}


@dataclass(frozen=True, slots=True)
class DrawState:
    """The arguments of an entry that describe draws, and where to store the drawn tokens (contract/abi.py).

    A draw replaces `last_tokens`, in entries other than `sample` also `positions`, and `counts` unless None.
    """

    slots: Tensor  # [rows] i64
    positions: Tensor  # [rows] i64
    sampling: Tensor  # [fields, rows] i64
    last_tokens: Tensor  # [slots] i64
    counts: Tensor | None = None  # [slots, vocab] i32


@dataclass(frozen=True, slots=True)
class LeftRows:
    """The rows to draw from: results of this function, or of another one that left them on the device.

    `values`, `indices` and `logits` of another function keep the shape of the arguments, as IREE would copy
    them for a reshape. `row_indices`: which of their rows to draw from; None for all rows, in order.
    """

    values: Tensor  # [any, K] or [any, 1, K] f32
    indices: Tensor  # [any, K] or [any, 1, K] i64
    logits: Tensor  # [any, vocab] or [any, 1, vocab] f32
    row_indices: Tensor | None = None  # [rows] i64


@dataclass(frozen=True, slots=True)
class AdjustedRows:
    """Rows of logits, and the adjustments of an entry `adjusted_sample_bs{N}` to apply before drawing."""

    logits: Tensor  # [any, 1, vocab] f32
    row_indices: Tensor  # [rows] i64
    penalties: Tensor  # [fields, rows] f32
    edits: Tensor  # [fields, any] i32
    allowed: Tensor  # [any, words] i32
    allowed_indices: Tensor  # [rows] i64
    slots: Tensor  # [rows] i64
    resets: Tensor  # [rows] i64
    counts: Tensor  # [slots, vocab] i32


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Rows of an entry `logprobs_bs{N}`, and where their tokens are."""

    values: Tensor  # [any, 1, K] f32
    indices: Tensor  # [any, 1, K] i64
    logits: Tensor  # [any, 1, vocab] f32
    row_indices: Tensor  # [rows] i64
    slots: Tensor  # [rows] i64
    last_tokens: Tensor  # [slots] i64


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """The results of an entry `logprobs_bs{N}`, in order."""

    terms: Tensor  # [fields, rows] i64
    top_values: Tensor  # [rows, K] f32
    top_indices: Tensor  # [rows, K] i64


Drawn = tuple[Tensor, DrawState]  # the token ids [rows] i64, and the state after the draws
# The results of an entry that reads existing rows, and the arguments that it updates in place, by name.
RowResults = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]


class FusedKernels(Protocol):
    """Kernels that compute runs of consecutive operations together."""

    def takes(self, operations: Sequence[Operation], values: Values) -> int:
        """Return the number of leading operations to lower together; 0 to lower the first one alone."""
        ...

    def lower(self, e: Emitter, run: Sequence[Operation], values: Values, results: Sequence[str]) -> None:
        """Emit the run, and write to `values` at least the `results`, which later operations read."""
        ...


class Lowering:
    """The kernels of a module: by kind of operation, and optional `fused` kernels for runs of operations.

    `prepare` emits the computation of the batch's fields that kernels read. Callers must call it once per
    function, before operations that read the batch. The default emits nothing, for complete batches.
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
        """Whether the device can sample from all logits of a sequence (whole rows), without top-k."""
        return bool(self._kernels[Sample].draws_rows)

    @property
    def places_logits(self) -> bool:
        """Whether the function's logits can be written to LOGITS_MEMORY."""
        return bool(getattr(self._kernels[Linear], "places_logits", False))

    def draw(self, e: Emitter, arguments: Mapping[str, Tensor]) -> RowResults:
        """Emit the draws of a `sample` entry with these arguments."""
        token_ids, state = self._sample(e, _taken(LeftRows, arguments), _taken(DrawState, arguments))
        return {"token_ids": token_ids}, {"last_tokens": state.last_tokens}

    def draw_adjusted(self, e: Emitter, arguments: Mapping[str, Tensor]) -> RowResults:
        """Emit the adjustments and the draws of an `adjusted_sample` entry with these arguments."""
        logits, counts = self._kernels[Sample].adjust(e, _taken(AdjustedRows, arguments))
        values, indices = self._kernels[TopK].top_k(e, logits)
        state = replace(_taken(DrawState, arguments), counts=counts)
        token_ids, state = self._sample(e, LeftRows(values, indices, logits), state, advances=True)
        assert state.counts is not None, "the tokens are counted"
        updated = {
            "positions": state.positions,
            "last_tokens": state.last_tokens,
            "counts": state.counts,
        }
        return {"token_ids": token_ids}, updated

    def logprobs(self, e: Emitter, arguments: Mapping[str, Tensor]) -> RowResults:
        """Emit the reductions of a `logprobs` entry with these arguments."""
        made: LogprobTensors = self._kernels[Sample].logprobs(e, _taken(ChosenRows, arguments))
        return {each.name: getattr(made, each.name) for each in fields(made)}, {}

    def _sample(self, e: Emitter, rows: LeftRows, state: DrawState, *, advances: bool = False) -> Drawn:
        token_ids, state = self._kernels[Sample].sample(e, rows, state, advances=advances)
        return token_ids, state

    def declarations(self) -> list[str]:
        """Return the MLIR of the executables that the operations emitted so far dispatch."""
        return list(self._rendered.texts.values())

    def lower(
        self, e: Emitter, operations: Sequence[Operation], values: Values, results: Sequence[str]
    ) -> None:
        """Emit `operations`, which read and write `values`; `results`: names of values the caller reads."""
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
            case Linear(out="logits") if (memory := values.memory_of_logits) is not None:
                values[operation.out] = kernels.linear_into(e, x, operation.weight, memory)
            case Linear():
                residual = values[operation.residual] if operation.residual else None
                values[operation.out] = kernels.linear(e, x, operation.weight, residual)
            case GatedLinear():
                values[operation.out] = kernels.gated_linear(e, x, operation.weight, operation.activation)
            case Route():
                scores = values[operation.scores] if operation.scores else None
                values[operation.out] = kernels.route(e, x, values.batch, scores)
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
                rows = LeftRows(x, values[operation.indices], values[operation.logits])
                state = DrawState(
                    slots=values[operation.slots],
                    positions=values[operation.positions],
                    sampling=values[operation.sampling],
                    last_tokens=values[operation.last_tokens],
                )
                values[operation.out], state = self._sample(e, rows, state, advances=True)
                values[operation.positions] = state.positions
                values[operation.last_tokens] = state.last_tokens
            case _:
                values[operation.out] = kernels.compute(e, operation, values)


def _taken(kind: type[_T], arguments: Mapping[str, Tensor]) -> _T:
    """Return the `kind` that consists of the arguments with the names of its fields; others have defaults."""
    return kind(**{each.name: arguments[each.name] for each in fields(kind) if each.name in arguments})


def _turn(run: Sequence[Operation], values: Values) -> None:
    """Select the batch's slab (the pages of some layers) for the paged operation or Route in `run`.

    Callers must pass runs with at most one such operation.
    """
    for operation in run:
        if isinstance(operation, PagedOperation):
            values.batch.turn_to(operation.layer, operation.rotation)
        elif isinstance(operation, Route):
            values.batch.turn_to_all_tokens()


def _live(run: Sequence[Operation], rest: Sequence[Operation], results: Sequence[str]) -> list[str]:
    """List the values that `run` writes and that `rest` or the caller (`results`) reads, in written order."""

    def is_read(name: str) -> bool:
        for operation in rest:
            if name in operation.reads:
                return True
            if name in operation.writes:
                return False
        return name in results

    return [name for name in dict.fromkeys(name for o in run for name in o.writes) if is_read(name)]
