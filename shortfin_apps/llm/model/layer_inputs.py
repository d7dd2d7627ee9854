"""Layer inputs: a small embedding of the token for each layer, which the layer adds at its end (Gemma 3n, 4).

The input of a layer is the sum of a row of a second embedding table, which has all layers side by side, and a
projection of the token's first embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shortfin_apps.llm.model.block import Block, ReferenceLayer
from shortfin_apps.llm.model.operations import (
    Activation,
    AddNormed,
    Linear,
    ModelTensor,
    Narrow,
    Operation,
)
from shortfin_apps.llm.model.reference.pointwise import F32, activated, rms_norm

TABLE, PROJECTION, NORM = (
    *("per_layer_token_embd.weight", "per_layer_model_proj.weight"),
    "per_layer_proj_norm.weight",
)
VALUE = "layer_inputs"  # the value with the inputs of all layers


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """The inputs of all layers: `features` per layer."""

    layers: int
    features: int

    @property
    def all_features(self) -> int:
        return self.layers * self.features

    def tensors(self, vocab: int, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors that make the inputs."""
        yield ModelTensor(TABLE, (vocab, self.all_features), TABLE)
        yield ModelTensor(PROJECTION, (self.all_features, hidden), PROJECTION)
        yield ModelTensor(NORM, (self.features,), NORM)

    def operations(self, tokens: str, x: str) -> Iterator[Operation]:
        """List the operations that make VALUE from the token ids and from their embeddings `x`."""
        yield EmbedLayers(tokens, "layer_embeddings", TABLE, self)
        yield Narrow(x, "narrow")
        yield Linear("narrow", "layer_projections", PROJECTION)
        yield JoinLayerInputs("layer_projections", VALUE, NORM, "layer_embeddings", self)

    def compute(self, x: F32, rows: F32, weights: Mapping[str, F32], eps: float) -> F32:
        """Return the inputs [tokens, layers, features]; `rows`: the tokens' rows of TABLE."""
        shape = (len(x), self.layers, self.features)
        projected = (x @ weights[PROJECTION].T * np.float32(x.shape[1] ** -0.5)).reshape(shape)
        embedded = rows.reshape(shape) * np.float32(self.features**0.5)
        inputs: F32 = (rms_norm(eps, projected, weights[NORM]) + embedded) * np.float32(0.5**0.5)
        return inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput(Block):
    """The addition of the layer's input, gated by the residual stream, projected and normed."""

    KIND: ClassVar[str] = "layer inputs"
    features: int
    activation: Activation = "gelu"

    @property
    def vector_sizes(self) -> dict[str, int]:
        return {"hidden_size_per_layer_input": self.features}

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors."""
        yield ModelTensor("inp_gate.weight", (self.features, hidden))
        yield ModelTensor("proj.weight", (hidden, self.features))
        yield ModelTensor("post_norm.weight", (hidden,))

    def operations(self, layer: int, x: str, out: str) -> Iterator[Operation]:
        """List the operations that read the residual stream `x` and write the new one to `out`."""
        prefix = f"blk.{layer}."
        yield Narrow(x, "narrow")
        yield Linear("narrow", "gate", f"{prefix}inp_gate.weight")
        yield GateLayerInput("gate", "gated", VALUE, layer, self)
        yield Linear("gated", "projected", f"{prefix}proj.weight")
        yield AddNormed("projected", out, f"{prefix}post_norm.weight", x)

    def compute(self, x: F32, layer: ReferenceLayer) -> F32:
        assert layer.carried.layer_inputs is not None
        gate = activated(self.activation, x @ layer.weights["inp_gate.weight"].T)
        gate *= layer.carried.layer_inputs[:, layer.number]
        return layer.normed(gate @ layer.weights["proj.weight"].T, "post_norm.weight")


@dataclass(frozen=True, slots=True)
class EmbedLayers(Operation):
    """Token ids [tokens] i64 -> rows of `weight` [tokens, all features] f32 times sqrt(features)."""

    weight: str
    inputs: LayerInputs


@dataclass(frozen=True, slots=True)
class JoinLayerInputs(Operation):
    """Projections [tokens, all features] f32 -> the inputs of all layers, the same shape.

    They are the mean of `x` / sqrt(hidden), with an RMS norm of each layer's features by `weight` [features],
    and of `embeddings`, times sqrt(2).
    """

    READS: ClassVar = ("x", "embeddings")
    weight: str
    embeddings: str
    inputs: LayerInputs


@dataclass(frozen=True, slots=True)
class GateLayerInput(Operation):
    """[tokens, features] f32 -> the same shape, in the matmuls' activation type: activation(x) * input.

    `inputs` names the value with the inputs of all layers, [tokens, all features] f32.
    """

    READS: ClassVar = ("x", "inputs")
    inputs: str
    layer: int
    block: LayerInput
