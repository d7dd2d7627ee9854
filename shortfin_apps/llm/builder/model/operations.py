"""The vocabulary in which a model family is written: its tensors, and a layer as a list of operations.

Values are named by strings and may be overwritten: a read gets the value written last.
Activations are `[tokens, features]`; a weight goes by the name of its parameters' weight (model/family.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.model.rope import Rotation


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A source's tensor: GGUF's name for it, its shape, and the stored weight on whose rows it is stacked.

    It is stored times `scale`, which is 1 unless the weight is a vector. The weight of a layer's experts is
    [experts, out, in], to which a tensor belongs that is of one `expert`.
    """

    name: str
    shape: tuple[int, ...]
    weight: str
    scale: float = 1.0
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """Reads the value `x` and writes the value `out`."""

    x: str
    out: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)


@dataclass(frozen=True, slots=True)
class Embed(Operation):
    """Token ids [tokens] i64 -> rows of `weight` times the spec's `embedding_scale`, [tokens, hidden] f32."""

    weight: str


@dataclass(frozen=True, slots=True)
class Norm(Operation):
    """RMS norm: [tokens, hidden] f32 -> the same shape, in the type that matmuls read."""

    weight: str


@dataclass(frozen=True, slots=True)
class AddNormed(Operation):
    """[tokens, hidden] f32 -> the same shape, f32: the RMS norm of `x`, plus the value `residual`."""

    weight: str
    residual: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x, self.residual)


@dataclass(frozen=True, slots=True)
class Narrow(Operation):
    """[tokens, hidden] f32 -> the same shape, in the type that matmuls read."""


@dataclass(frozen=True, slots=True)
class Linear(Operation):
    """[tokens, in] -> [tokens, out] f32: `x` times the transpose of `weight`, plus the value `residual`."""

    weight: str
    residual: str | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,) if self.residual is None else (self.x, self.residual)


@dataclass(frozen=True, slots=True)
class AddBias(Operation):
    """[tokens, features] f32 -> the same shape: `weight` [features] added to every row."""

    weight: str


@dataclass(frozen=True, slots=True)
class NormHeads(Operation):
    """q, k and v [tokens, qkv features] f32 -> the same shape: RMS norm of each head of q and of k.

    `weight` [2 * head_dim] holds the weights of q's heads, then of k's.
    """

    weight: str


@dataclass(frozen=True, slots=True)
class NormWhole(Operation):
    """As NormHeads, but q is normed as a whole, over all its heads, and so is k.

    `weight` [(heads + kv_heads) * head_dim] holds q's weights, then k's.
    """

    weight: str


@dataclass(frozen=True, slots=True)
class GatedLinear(Operation):
    """[tokens, in] -> [tokens, out / 2], in the type that matmuls read: the spec's `activation` of gate,
    times up, `weight` holding gate and up."""

    weight: str


@dataclass(frozen=True, slots=True)
class Route(Operation):
    """Logits of a router [tokens, experts] f32 -> which experts each token has, with what weights (see
    RoutedExperts): a value for the two operations below, in whatever form the same kernels read it.

    Padding has no experts.
    """


@dataclass(frozen=True, slots=True)
class GatedExperts(Operation):
    """[tokens, in] -> [tokens * experts per token, out / 2], in the type that matmuls read: the GatedLinear
    of each of a token's experts, most likely first. `weight` is [experts, out, in], `bias` [experts, out] f32
    is added ahead of the activation, `routing` is Route's value.

    Reads no weights of an expert that no token has. What padding gets is undefined.
    """

    weight: str
    routing: str
    bias: str | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x, self.routing)


@dataclass(frozen=True, slots=True)
class SumExperts(Operation):
    """[tokens * experts per token, in] -> [tokens, out] f32: the value `residual`, plus each expert's Linear
    times its weight, most likely first. `weight` is [experts, out, in], and `bias` [experts, out] f32 a part
    of the Linear; padding gets the residual alone."""

    weight: str
    routing: str
    residual: str
    bias: str | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x, self.routing, self.residual)


@dataclass(frozen=True, slots=True)
class Attend(Operation):
    """q, k and v [tokens, qkv features] f32 -> [tokens, heads * head_dim], in the type that matmuls read.

    Turns q and k by the layer's `rotation`, writes k and v to its part of the KV cache, and attends over it,
    as far as the layer's window reaches (the spec's `window_of`), with its sinks (`sinks_of`).
    """

    layer: int
    rotation: Rotation = Rotation.GLOBAL


@dataclass(frozen=True, slots=True)
class DropGates(Operation):
    """[tokens, q features + qkv features] f32 -> [tokens, qkv features]: q, k and v without the gates of
    attention's result, which are between q and k."""


@dataclass(frozen=True, slots=True)
class Gate(Operation):
    """[tokens, heads * head_dim] -> the same shape and type: `x` times the sigmoid of the gates in `gates`,
    which is what DropGates reads."""

    gates: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x, self.gates)


@dataclass(frozen=True, slots=True)
class GateTokens(Operation):
    """[tokens, features] -> the same shape and type: `x` times the sigmoid of the value `gates` [tokens, 1]
    f32."""

    gates: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x, self.gates)


@dataclass(frozen=True, slots=True)
class DeltaRule(Operation):
    """The inputs of a gated delta net (DeltaNet) -> [tokens, value features], in the type that matmuls read.

    `x` [tokens, channels + value features] f32 are the convolution's inputs and gates of the result; `rates`
    [tokens, 2 * value_heads] f32 has b before its sigmoid, and what the decay is made of: g is the second
    half of `steps` times the softplus of that plus the first half. q and k are divided by their lengths, q
    also by sqrt(key_dim), and the result of each head is an RMS norm of o by `norm`, times the SiLU of its
    gates. Padding yields zeros.

    A layer's state is in its page of the cache's second slab: that of the block of the token before, which
    is read, and those of the blocks that tokens are in, which have the state behind the last of them.
    """

    rates: str
    layer: int
    conv: str  # [channels, taps]
    steps: str  # [2 * value_heads]
    norm: str  # [value_dim]

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x, self.rates)


@dataclass(frozen=True, slots=True)
class LastTokens(Operation):
    """[tokens, hidden] -> [rows, hidden]: each row's last token that is not padding."""


@dataclass(frozen=True, slots=True)
class CapLogits(Operation):
    """[rows, vocab] f32 -> the same shape: cap * tanh(x / cap), of the spec's `logit_cap`."""


@dataclass(frozen=True, slots=True)
class TopK(Operation):
    """[rows, vocab] f32 -> `out` [rows, k] f32 and `indices` [rows, k] i64, in descending order."""

    indices: str

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out, self.indices)


@dataclass(frozen=True, slots=True)
class Sample(Operation):
    """Candidates as of TopK -> `out` [rows] i64, the token that a decode loop draws for each row.

    `logits` [rows, vocab] f32 are what they are the best of. Reads the loop's `sampling` [fields, rows] i64,
    and advances its `tokens` and `positions` [rows] i64.
    """

    indices: str
    logits: str
    sampling: str = "sampling"
    tokens: str = "tokens"
    positions: str = "positions"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x, self.indices, self.logits, self.sampling, self.tokens, self.positions)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out, self.tokens, self.positions)
