"""The stages of a fused layer (a run of operations in one dispatch), and the buffers between stages.

A value is in a buffer named like the value; a quantised form of it is in `VALUE_blocks` or `VALUE_int8`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Tensor
from shortfin_apps.llm.builder.kernels.activations import Int8Tiles, QuantBlocks
from shortfin_apps.llm.builder.kernels.epilogue import Epilogue
from shortfin_apps.llm.builder.kernels.fused.layer import AttentionGeometry
from shortfin_apps.llm.builder.lowering.lowering import Values
from shortfin_apps.llm.builder.weights.layout import WeightLayout
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.model.attention import Attend, Attention
from shortfin_apps.llm.model.operations import GatedLinear, Linear, Norm, Operation
from shortfin_apps.llm.model.spec import QuantBits

# Forms of a matmul's input: floats, blocks of integers, or 8-bit integers with a scale per token.
Operands = Literal["floats", "blocks", "int8"]


class DecodeAttention(Protocol):
    """A class of Attend kernels that has a decode kernel for use as a stage of a fused layer."""

    def decode_geometry(self, block: Attention, batch: Batch) -> AttentionGeometry:
        """Return the geometry of the decode kernel, for sequences with one token each."""
        ...


@dataclass(frozen=True, slots=True)
class MatmulStage:
    """A stage that multiplies `x` by the transpose of `weight` and writes to `out`.

    `x`, `out`, `residual` and `quantised` name buffers. `epilogue`: stores the product, adds `residual`, or
    computes activation(gate) * up. `x_kept`: another stage of this dispatch, but not attention, wrote `x`, so
    that `x` has the target's format between stages (`StageKernels.kept`). `quantised`: a gated stage with
    weights in blocks also writes its result there, in blocks.
    """

    weight: str
    x: str
    x_kept: bool
    out: str
    epilogue: Epilogue = "store"
    residual: str | None = None
    quantised: str | None = None


@dataclass(frozen=True, slots=True)
class AttendStage:
    """The first stage of a fused layer in a decode: attention, to `out` [rows, heads * head_dim] floats.

    Also writes the new keys and values to the batch's cache.
    """

    operation: Attend
    qkv: Tensor
    batch: Batch
    geometry: AttentionGeometry

    @property
    def out(self) -> str:
        return self.operation.out

    def constants(self) -> list[Dim]:
        return [self.batch.width, self.batch.pages, self.batch.place_of(self.operation.layer)]

    def reads(self) -> dict[str, Tensor]:
        batch = self.batch
        return {
            "all_qkv": self.qkv,
            "all_rotary": batch.rotary,
            "starts": batch.starts,
            "seq_lens": batch.seq_lens,
            "blocks": batch.blocks,
        }


@dataclass(frozen=True, slots=True)
class NormStage:
    """A stage that writes the RMS norm of `x` to `out`, in the form that matmuls with `layout` read.

    `x_kept`: see MatmulStage.
    """

    weight: str
    x: str
    x_kept: bool
    out: str
    layout: WeightLayout


@dataclass(frozen=True, slots=True)
class QuantiseStage:
    """A stage that quantises floats `x` [rows, size] to `out`, the input of matmuls with weights in `layout`.

    `x_kept`: see MatmulStage.
    """

    x: str
    x_kept: bool
    out: str
    layout: WeightLayout
    size: int


Stage = AttendStage | MatmulStage | NormStage | QuantiseStage


class StageList(list[Stage]):
    """The stages of `run`, and the buffers of its values.

    `reads`: names of values that other dispatches computed; the stages must not write to their buffers.
    `operands_of`: the form of the input of matmuls with a layout.
    """

    def __init__(
        self,
        run: Sequence[Operation],
        reads: Collection[str],
        values: Values,
        weights: WeightTypes,
        operands_of: Callable[[WeightLayout], Operands],
        attention: DecodeAttention | None,
    ) -> None:
        super().__init__()
        self._reads = reads
        self._values = values
        self._weights = weights
        self._operands_of = operands_of
        self._attention = attention
        self._held: dict[str, dict[Operands | None, str]] = {name: {None: name} for name in reads}
        self._kept: set[str] = set()
        self.features: dict[str, int] = {}  # Linear's result -> its number of features
        for index, operation in enumerate(run):
            self._add(operation, run[index + 1 :])

    def buffer(self, value: str) -> str:
        """Return the buffer with the value in the form in which it was computed first."""
        return next(iter(self._held[value].values()))

    def _add(self, operation: Operation, rest: Sequence[Operation]) -> None:
        match operation:
            case Attend():
                self._add_attend(operation)
            case Norm():
                reader = next(
                    o for o in rest if operation.out in o.reads and isinstance(o, Linear | GatedLinear)
                )
                self._add_norm(operation, self._weights.layout(reader.weight))
            case GatedLinear():
                self._add_gated(operation)
            case Linear():
                self._add_linear(operation)

    def _add_attend(self, operation: Attend) -> None:
        assert self._attention is not None
        qkv, batch = self._values[operation.x], self._values.batch
        geometry = self._attention.decode_geometry(operation.block, batch)
        self.append(AttendStage(operation, qkv, batch, geometry))
        self._held[operation.out] = {"floats": operation.out}

    def _add_norm(self, operation: Norm, layout: WeightLayout) -> None:
        operands, x = self._operands_of(layout), self.buffer(operation.x)
        out = _buffer_name(operation.out, operands)
        self.append(NormStage(operation.weight, x, x in self._kept, out, layout))
        self._held[operation.out] = {operands: out}
        self._kept.add(out)

    def _add_gated(self, operation: GatedLinear) -> None:
        x, out, weight = self._operand(operation.x, operation.weight), operation.out, operation.weight
        held: dict[Operands | None, str] = {"floats": out}
        if self._operands_of(self._weights.layout(weight)) == "blocks":
            held["blocks"] = _buffer_name(out, "blocks")
        quantised = held.get("blocks")
        self.append(MatmulStage(weight, x, x in self._kept, out, operation.activation, quantised=quantised))
        self._held[out] = held
        self._kept.add(quantised or out)

    def _add_linear(self, operation: Linear) -> None:
        x, weight = self._operand(operation.x, operation.weight), operation.weight
        residual = self.buffer(operation.residual) if operation.residual else None
        out = f"new_{operation.out}" if operation.out in self._reads else operation.out
        epilogue: Epilogue = "residual" if residual else "store"
        self.append(MatmulStage(weight, x, x in self._kept, out, epilogue, residual))
        self._held[operation.out] = {None: out}
        self.features[operation.out] = self._weights.shape(weight)[0]

    def _operand(self, value: str, weight: str) -> str:
        """Return the buffer with the value in the form that a matmul with `weight` reads.

        Adds a stage that quantises the value, unless a buffer already has the value in this form.
        """
        layout, held = self._weights.layout(weight), self._held[value]
        operands = self._operands_of(layout)
        x = self.buffer(value)
        if operands == "floats":
            return x
        if operands not in held:
            held[operands] = out = _buffer_name(value, operands)
            size = self._weights.shape(weight)[1]
            self.append(QuantiseStage(x, x in self._kept, out, layout, size))
            self._kept.add(out)
        return held[operands]


def inputs_of(run: Sequence[Operation]) -> set[str]:
    """Return the values that a run reads before writing them, except the inputs of attention."""
    inputs: set[str] = set()
    written: set[str] = set()
    for operation in run:
        if not isinstance(operation, Attend):
            inputs |= set(operation.reads) - written
        written |= set(operation.writes)
    return inputs


def buffer_row_bytes(
    operations: Sequence[Operation], weights: WeightTypes, kept_bytes: int, quant_bits: QuantBits
) -> dict[str, int]:
    """Return buffer name -> bytes per token, for each buffer that may be internal to a dispatch.

    These are Linear's results in f32, and inputs of matmuls in all forms, where a float takes `kept_bytes`,
    and a quant in blocks `quant_bits`.
    A name that several layers use gets the largest size.
    """
    matmuls = [each for each in operations if isinstance(each, Linear | GatedLinear)]
    sums = [{each.out: 4 * weights.shape(each.weight)[0]} for each in matmuls if isinstance(each, Linear)]
    operands = [
        operand_bytes(kept_bytes, quant_bits, each.x, weights.shape(each.weight)[1]) for each in matmuls
    ]
    largest: dict[str, int] = {}
    for name, size in (pair for sizes in (*sums, *operands) for pair in sizes.items()):
        largest[name] = max(size, largest.get(name, 0))
    return largest


def operand_bytes(kept_bytes: int, quant_bits: QuantBits, name: str, features: int) -> dict[str, int]:
    """Return buffer name -> bytes per token, for the float buffer `name` and its quantised forms."""
    return {
        name: kept_bytes * features,
        f"{name}_blocks": QuantBlocks(features, quant_bits).row_bytes,
        f"{name}_int8": Int8Tiles(features).row_bytes,
        f"{name}_int8.scales": 4,
    }


def _buffer_name(value: str, operands: Operands) -> str:
    return value if operands == "floats" else f"{value}_{operands}"
