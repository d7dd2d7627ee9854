"""A kind of block that the package does not know: its class and one lowering are enough for every target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from pydantic import TypeAdapter

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.linalg.bodies import yield_as
from shortfin_apps.llm.builder.lowering.linalg.table import LOWERINGS
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, Values
from shortfin_apps.llm.builder.program.module import ModelModule
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.model.block import Block, ReferenceLayer
from shortfin_apps.llm.model.operations import Linear, ModelTensor, Norm, Operation
from shortfin_apps.llm.model.reference.pointwise import F32
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, WeightType
from tests.builder.agreement import STRIDE, expect, pages_for, prefill_row
from tests.builder.compiled_model import GENERIC, HOST, TINY, CompiledModel, block_table
from tests.builder.specs import changed, with_blocks
from tests.matrices import slow_rows_but


@dataclass(frozen=True, slots=True, kw_only=True)
class SquaredFeedForward(Block):
    """A feed-forward without a gate; its activation is the square of what is above 0."""

    KIND: ClassVar[str] = "squared feed-forwards"
    features: int

    @property
    def vector_sizes(self) -> dict[str, int]:
        return {"features": self.features}

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        yield ModelTensor("ffn_norm.weight", (hidden,))
        yield ModelTensor("ffn_up.weight", (self.features, hidden))
        yield ModelTensor("ffn_down.weight", (hidden, self.features))

    def operations(self, layer: int, x: str, out: str) -> Iterator[Operation]:
        prefix = f"blk.{layer}."
        yield Norm(x, "normed", f"{prefix}ffn_norm.weight")
        yield Linear("normed", "up", f"{prefix}ffn_up.weight")
        yield Square("up", "squared")
        yield Linear("squared", out, f"{prefix}ffn_down.weight", residual=x)

    def compute(self, x: F32, layer: ReferenceLayer) -> F32:
        up = layer.normed(x, "ffn_norm.weight") @ layer.weights["ffn_up.weight"].T
        added: F32 = np.maximum(up, 0) ** 2 @ layer.weights["ffn_down.weight"].T
        return added


@dataclass(frozen=True, slots=True)
class Square(Operation):
    """[tokens, features] f32 -> the same shape, in the matmuls' activation type."""


def square(c: LoweringContext, e: Emitter, operation: Square, values: Values) -> Tensor:
    x, act = values[operation.x], c.options.activations
    body = f"""\
  %zero = arith.constant 0.0 : f32
  %above = arith.maximumf %a, %zero : f32
  %y = arith.mulf %above, %above : f32
{yield_as("%y", act)}"""
    return e.elementwise("td", ("td", x.shape, act), [(x, "td")], body)


SIZES = {0: SquaredFeedForward(features=96), 1: SquaredFeedForward(features=64)}
SPEC = with_blocks(changed(TINY, {"head_dim": 32}, layers=3), SIZES)


@pytest.fixture(autouse=True)
def lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOWERINGS, Square, square)


def options(weights: WeightType, device: str = "cpu") -> BuildOptions:
    return BuildOptions(
        device=device,
        weights=weights,
        kv="f32" if weights == "f32" else "bf16",
        prefill_batch_sizes=(1,),
        decode_batch_sizes=(2,),
        top_k=8,
    )


CASES = [*((HOST, weights) for weights in ("f32", "bf16", "int8", "q4")), (GENERIC, "f32")]


@pytest.mark.parametrize(("target", "weights"), slow_rows_but([(HOST, "int8")], CASES))
def test_it_agrees_with_its_reference(
    device: Device, tmp_path: Path, target: Target, weights: WeightType
) -> None:
    model = CompiledModel.build(SPEC, options(weights), device, tmp_path, target)
    prompt = np.arange(1, 40)
    blocks = block_table(np.random.default_rng(0), [pages_for(len(prompt))], 4)
    expect(model, prefill_row(model, prompt, blocks, 4 * STRIDE, "prefill_bs1").logits[0], prompt)


@pytest.mark.parametrize("weights", ["bf16", "q8_0", "int8"])
@pytest.mark.parametrize("cpu", ["sapphirerapids", "znver4", "haswell", "neoverse-v1"])
def test_every_kind_of_cpu_has_it_in_its_program(cpu: str, weights: WeightType) -> None:
    made = ModelModule(SPEC, options(weights, f"cpu:{cpu}"), resolve_target(f"cpu:{cpu}"))
    assert "arith.maximumf %a, %zero" in made.text()
    assert "Square: linalg" in map(str, made.choices)


def test_a_manifest_keeps_it() -> None:
    adapter = TypeAdapter(ModelSpec)
    assert adapter.validate_json(adapter.dump_json(SPEC)) == SPEC
