"""The classes that describe a model for the builder: source tensors, and the operations of a layer.

An operation names its input and output values by strings. Several operations may write the same name; a
later operation reads the value written last. Activations are `[tokens, features]`; weights are named as in
`ModelSpec.tensors`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from shortfin_apps.llm.model.rope import Rotation

# For gate g and up u: silu(g) * u; gelu(g) * u, with gelu approximated by tanh; "clamped" (gpt-oss) is
# g * sigmoid(1.702 g) * (u + 1), with g clamped to at most 7 and u to -7 .. 7.
Activation = Literal["silu", "gelu", "clamped"]
# How a matrix is stored (vectors are always f32): in the build's weight type; as floats, even if that type is
# quantised; as floats in row-major order on every target; or transposed, for the taps [channels, taps] of a
# convolution.
Stored = Literal["weights", "floats", "rows", "taps"]


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of the source, and the stored weight that contains its rows.

    `name` and `shape`: as in GGUF; `weight`: the stored weight, with several tensors stacked along rows
    ("": the tensor alone, under its own name); `scale`: a factor applied when storing, 1 unless the weight is
    a vector; `expert`: the expert's number, if the stored weight is [experts, out, in]; `layer`: the layer
    that has the tensor, if it is not the one that has the weight.
    """

    name: str
    shape: tuple[int, ...]
    weight: str = ""
    scale: float = 1.0
    expert: int | None = None
    stored: Stored = "weights"
    layer: int | None = None

    def of_layer(self, layer: int) -> ModelTensor:
        """Return the tensor with the prefix `blk.LAYER.` added to its name and its weight's name."""
        name = f"blk.{layer if self.layer is None else self.layer}.{self.name}"
        return replace(self, name=name, weight=f"blk.{layer}.{self.weight or self.name}")


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that reads the value named by `x` and writes the value named by `out`.

    READS and WRITES list the fields that name values. A field in READS that is None reads nothing.
    """

    READS: ClassVar[tuple[str, ...]] = ("x",)
    WRITES: ClassVar[tuple[str, ...]] = ("out",)
    x: str
    out: str

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(value for field in self.READS if (value := getattr(self, field)) is not None)

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(getattr(self, field) for field in self.WRITES)


@dataclass(frozen=True, slots=True)
class PagedOperation(Operation):
    """An operation that reads and writes the KV cache or state pages of `layer`."""

    layer: int

    @property
    def rotation(self) -> Rotation | None:
        """The rotation that the operation applies to q and k; None for none."""
        return None


@dataclass(frozen=True, slots=True)
class Embed(Operation):
    """Token ids [tokens] i64 -> embeddings [tokens, hidden] f32: rows of `weight` * spec.embedding_scale."""

    weight: str


@dataclass(frozen=True, slots=True)
class Norm(Operation):
    """RMS norm: [tokens, hidden] f32 -> the same shape, in the matmuls' activation type.

    Other operations than matmuls must not read the result, as kernels may fuse the norm into the matmul.
    """

    weight: str


@dataclass(frozen=True, slots=True)
class AddNormed(Operation):
    """RMS norm of `x`, then the addition of `residual`: [tokens, hidden] f32 -> the same shape, f32."""

    READS: ClassVar = ("x", "residual")
    weight: str
    residual: str


@dataclass(frozen=True, slots=True)
class Narrow(Operation):
    """Conversion: [tokens, hidden] f32 -> the same shape, in the matmuls' activation type."""


def norm_before(x: str, weight: str | None) -> Operation:
    """Return the operation that makes the value "normed" of `x`: a Norm, or a Narrow if `weight` is None."""
    return Narrow(x, "normed") if weight is None else Norm(x, "normed", weight)


@dataclass(frozen=True, slots=True)
class Linear(Operation):
    """[tokens, in] -> [tokens, out] f32: `x` times the transpose of `weight`, plus `residual` if not None."""

    READS: ClassVar = ("x", "residual")
    weight: str
    residual: str | None = None


@dataclass(frozen=True, slots=True)
class AddBias(Operation):
    """[tokens, features] f32 -> the same shape: adds `weight` [features] to each token."""

    weight: str


@dataclass(frozen=True, slots=True)
class GatedLinear(Operation):
    """[tokens, in] -> [tokens, out / 2], in the matmuls' activation type: activation(gate) * up.

    `weight` [out, in] has the rows of the gate projection, then of the up projection.
    """

    weight: str
    activation: Activation


@dataclass(frozen=True, slots=True)
class Activate(Operation):
    """[tokens, 2 * features] f32 -> [tokens, features], in the matmuls' activation type.

    `x` has the gate, then up; the result is activation(gate) * up.
    """

    activation: Activation


@dataclass(frozen=True, slots=True)
class LastTokens(Operation):
    """[tokens, hidden] -> [rows, hidden]: the last token, without padding, of each sequence of the batch."""


@dataclass(frozen=True, slots=True)
class CapLogits(Operation):
    """[rows, vocab] f32 -> the same shape: cap * tanh(x / cap), with cap = spec.logit_cap."""


@dataclass(frozen=True, slots=True)
class TopK(Operation):
    """Logits [rows, vocab] f32 -> the k largest, `out` [rows, k] f32, and their `indices` [rows, k] i64.

    Both results are in descending order of the logits.
    """

    WRITES: ClassVar = ("out", "indices")
    indices: str


@dataclass(frozen=True, slots=True)
class Sample(Operation):
    """TopK's results -> `out` [rows] i64, the token that a decode loop draws for each sequence.

    `logits` [rows, vocab] f32: all logits. `sampling` [fields, rows] i64, `slots` and `positions` [rows] i64,
    and `last_tokens` [slots] i64 are arguments of the loop (contract/abi.py). The operation replaces
    `positions` by the next ones, and stores the drawn tokens in `last_tokens`.
    """

    WRITES: ClassVar = ("out", "positions", "last_tokens")
    READS: ClassVar = ("x", "indices", "logits", "sampling", "slots", "positions", "last_tokens")
    indices: str
    logits: str
    sampling: str = "sampling"
    slots: str = "slots"
    positions: str = "positions"
    last_tokens: str = "last_tokens"
