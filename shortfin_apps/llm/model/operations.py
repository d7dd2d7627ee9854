"""The vocabulary for describing a model family: its tensors, and a layer as a list of operations.

Values are named by strings and may be overwritten: a read gets the last written value. Activations are
`[tokens, features]`; weights are named as in model/spec.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from shortfin_apps.llm.model.rope import Rotation

# For gate g and up u: silu(g) * u and gelu(g) * u (with gelu approximated by tanh); gpt-oss's clamped is g *
# sigmoid(1.702 g) * (u + 1), with g at most 7 and u from -7 to 7.
Activation = Literal["silu", "gelu", "clamped"]
# Of matrices, while vectors are in f32: in the build's weight type; in floats, however small that type is; or
# tap by tap, for the factors [channels, taps] of a convolution.
Stored = Literal["weights", "floats", "taps"]


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A source's tensor: its GGUF name and shape, and the stored weight that stacks its rows.

    It is stored times `scale`, which is 1 unless the weight is a vector. The weight of a layer's experts is
    [experts, out, in]; `expert` is the number of a tensor's expert.
    """

    name: str
    shape: tuple[int, ...]
    weight: str = ""
    scale: float = 1.0
    expert: int | None = None
    stored: Stored = "weights"

    def of_layer(self, layer: int) -> ModelTensor:
        """Return the tensor of a layer, given by its names in the layer."""
        name, weight = (f"blk.{layer}.{each}" for each in (self.name, self.weight or self.name))
        return replace(self, name=name, weight=weight)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that reads the value `x` and writes the value `out`.

    READS and WRITES list the fields that name values; a field may be None.
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
    """An operation that reads and writes the pages of `layer`."""

    layer: int

    @property
    def rotation(self) -> Rotation | None:
        """The rotation that it applies to its input."""
        return None


@dataclass(frozen=True, slots=True)
class Embed(Operation):
    """Token ids [tokens] i64 -> rows of `weight` times the spec's `embedding_scale`, [tokens, hidden] f32."""

    weight: str


@dataclass(frozen=True, slots=True)
class Norm(Operation):
    """RMS norm: [tokens, hidden] f32 -> the same shape, in the matmuls' activation type.

    Only operations with matmuls read the result, as kernels may leave the norm to them.
    """

    weight: str


@dataclass(frozen=True, slots=True)
class AddNormed(Operation):
    """RMS norm of `x` plus the value `residual`: [tokens, hidden] f32 -> the same shape, f32."""

    READS: ClassVar = ("x", "residual")
    weight: str
    residual: str


@dataclass(frozen=True, slots=True)
class Narrow(Operation):
    """[tokens, hidden] f32 -> the same shape, in the matmuls' activation type."""


def norm_before(x: str, weight: str | None) -> Operation:
    """Return the operation before a block's matmuls: `x` to the value `normed`, with or without a norm."""
    return Narrow(x, "normed") if weight is None else Norm(x, "normed", weight)


@dataclass(frozen=True, slots=True)
class Linear(Operation):
    """[tokens, in] -> [tokens, out] f32: `x` times the transpose of `weight`, plus the value `residual`."""

    READS: ClassVar = ("x", "residual")
    weight: str
    residual: str | None = None


@dataclass(frozen=True, slots=True)
class AddBias(Operation):
    """[tokens, features] f32 -> the same shape: `weight` [features] added to every row."""

    weight: str


@dataclass(frozen=True, slots=True)
class GatedLinear(Operation):
    """[tokens, in] -> [tokens, out / 2], in the matmuls' activation type: the activation of gate, times up.

    `weight` holds gate and up.
    """

    weight: str
    activation: Activation


@dataclass(frozen=True, slots=True)
class LastTokens(Operation):
    """[tokens, hidden] -> [rows, hidden]: each row's last token that is not padding."""


@dataclass(frozen=True, slots=True)
class CapLogits(Operation):
    """[rows, vocab] f32 -> the same shape: cap * tanh(x / cap), with the spec's `logit_cap`."""


@dataclass(frozen=True, slots=True)
class TopK(Operation):
    """[rows, vocab] f32 -> `out` [rows, k] f32 and `indices` [rows, k] i64, in descending order."""

    WRITES: ClassVar = ("out", "indices")
    indices: str


@dataclass(frozen=True, slots=True)
class Sample(Operation):
    """TopK's candidates -> `out` [rows] i64, the token that a decode loop draws for each row.

    `logits` [rows, vocab] f32 are the full rows of the candidates. Reads the loop's `sampling` [fields, rows]
    i64, and advances its `tokens` and `positions` [rows] i64.
    """

    WRITES: ClassVar = ("out", "tokens", "positions")
    READS: ClassVar = ("x", "indices", "logits", "sampling", "tokens", "positions")
    indices: str
    logits: str
    sampling: str = "sampling"
    tokens: str = "tokens"
    positions: str = "positions"
