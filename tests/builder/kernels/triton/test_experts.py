"""The feed-forward of routed experts, with the norm behind it, against numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.batch import Batch, Slab
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.lowering import Lowering, RenderedKernels, Values
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.builder.weights.layout import Fp8Rows
from shortfin_apps.llm.contract.gpu_code.chips import Fp8Type
from shortfin_apps.llm.model.feed_forward import GatedExperts, MoE, Route, SumExperts, route
from shortfin_apps.llm.model.operations import Linear, Norm, Operation
from shortfin_apps.llm.model.reference.pointwise import gated
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, WeightType
from shortfin_apps.llm.model.weight_blocks import MXFP4, BlockType
from tests.builder.compiled_kernels import store_weight
from tests.builder.compiled_model import ROUTED
from tests.builder.kernels.triton.conftest import Launch, context_of
from tests.builder.kernels.triton.given_weights import GivenWeights
from tests.builder.kernels.triton.launched import Array, Inputs, Launched, rounded
from tests.builder.kernels.triton.test_fp8 import cast, rounded_to_fp8
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.lowering.triton.layers import TritonLayers
from tests.builder.specs import changed, with_experts

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(300)]

F32 = npt.NDArray[np.float32]
EXPERTS = MoE(count=7, per_token=3, features=96)
BROKEN = 5  # the expert whose weights are NaN, where they are floats
SPEC = with_experts(ROUTED, EXPERTS)
HIDDEN, STRIDE = SPEC.hidden_size, 16
TOLERANCE: dict[WeightType, float] = {
    "f32": 1e-4,
    "f16": 1e-2,
    "bf16": 5e-2,
    "q8_0": 5e-2,
    "q4": 5e-2,
    "fp8": 5e-2,
}
GATE_UP, DOWN = "blk.1.ffn_gate_up_exps.weight", "blk.1.ffn_down_exps.weight"
GATE_UP_BIAS, DOWN_BIAS = "blk.1.ffn_gate_up_exps.bias", "blk.1.ffn_down_exps.bias"
BIASED = changed(SPEC, {"activation": "clamped", "biases": True})  # as gpt-oss
SHAPES = {
    GATE_UP: (EXPERTS.count, 2 * EXPERTS.features, HIDDEN),
    DOWN: (EXPERTS.count, HIDDEN, EXPERTS.features),
}


def operations(has_biases: bool) -> list[Operation]:
    biases = (GATE_UP_BIAS, DOWN_BIAS) if has_biases else (None, None)
    return [
        Route("logits", "routing"),
        GatedExperts("x", "gated", GATE_UP, "routing", biases[0]),
        SumExperts("gated", "sum", DOWN, "routing", "residual", biases[1]),
        Norm("sum", "normed", "norm"),
        Linear("normed", "next", "eye"),
    ]


class ExpertWeights(GivenWeights):
    """Those of which two are of experts, and lie one behind another."""

    def shape(self, name: str) -> tuple[int, ...]:
        rows, *columns = super().shape(name)
        return (EXPERTS.count, rows // EXPERTS.count, *columns) if name in SHAPES else (rows, *columns)


class FeedForward:
    """`operations` for a number of tokens, or for any, with weights of some type."""

    def __init__(
        self,
        kind: WeightType,
        tokens: int | str,
        chip: str,
        launch: Launch,
        spec: ModelSpec = SPEC,
        block_types: Mapping[str, BlockType] | None = None,
    ) -> None:
        options = BuildOptions(
            device=f"hip:{chip}",
            weights=kind,
            kv="f32",
            block_seq_stride=STRIDE,
            block_types=tuple((block_types or {}).items()),
        )
        self._context = context_of(spec, chip, options)
        self.act = options.activations
        self._fp8: Fp8Type | None = None
        self._blocks: dict[str, BlockType] = {}
        self.values: dict[str, F32] = {}
        self._arguments: dict[str, Array] = {"norm": np.ones(HIDDEN), "eye": np.eye(HIDDEN)}
        self._parameters = {"norm": "norm", "eye": "eye"}
        assert spec.experts
        self._has_biases = spec.experts.biases
        inputs = {
            "x": (self.act, (tokens, HIDDEN)),
            "logits": ("f32", (tokens, EXPERTS.count)),
            "residual": ("f32", (tokens, HIDDEN)),
            "slots": ("i64", (tokens,)),
            "norm": ("f32", (HIDDEN,)),
            "eye": (self.act, (HIDDEN, HIDDEN)),
        }
        self._program: Launched = launch({**inputs, **self._stored()}, self._body, self._context)

    def _stored(self) -> Inputs:
        context, inputs = self._context, {}
        for name, weight in make_weights(context.options).items():
            layout = weight_layout(name, SPEC, context.options, context.target)
            arrays, self.values[name] = store_weight(weight, layout)
            stored = layout.stored(name, (weight.shape[0] * weight.shape[1], weight.shape[2]))
            if layout.blocks is not None:
                self._blocks[name] = layout.blocks
            for (parameter, (shape, dtype)), array in zip(stored.items(), arrays, strict=True):
                argument = parameter.replace(".", "_")
                if isinstance(layout, Fp8Rows) and dtype == layout.dtype:  # runtimes have no arrays of it
                    self._fp8, dtype, array = layout.dtype, "i8", array.view(np.int8)
                self._parameters[parameter], self._arguments[argument] = argument, array
                inputs[argument] = (dtype, shape)
        return {**inputs, **self._stored_biases()}

    def _stored_biases(self) -> Inputs:
        """Of which some are past the limits of what is gated."""
        rng, inputs = np.random.default_rng(1), {}
        for name, matrix in {GATE_UP_BIAS: GATE_UP, DOWN_BIAS: DOWN}.items() if self._has_biases else ():
            argument, shape = name.replace(".", "_"), SHAPES[matrix][:2]
            self.values[name] = self._arguments[argument] = 5 * rng.standard_normal(shape, np.float32)
            self._parameters[name], inputs[argument] = argument, ("f32", shape)
        return inputs

    def _body(self, e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
        given = {name: tensors[argument] for name, argument in self._parameters.items()}
        if self._fp8 is not None:
            given |= {name: cast(e, given[name], self._fp8) for name in SHAPES}
        layers = TritonLayers(replace(self._context, weights=ExpertWeights(given, self._blocks)))
        batch = Batch.__new__(Batch)
        batch.slabs = (Slab.__new__(Slab),)
        batch.turn_to_all_tokens()
        batch.slots, batch.chunk = tensors["slots"], None
        values = Values({name: tensors[name] for name in ("x", "logits", "residual")}, batch)
        kernels = dict.fromkeys((Route, GatedExperts, SumExperts, Norm, Linear), layers)
        Lowering(kernels, RenderedKernels(), layers).lower(
            e, operations(self._has_biases), values, ["sum", "next"]
        )
        return [values["sum"], values["next"]]

    def __call__(self, inputs: Mapping[str, F32], padding: tuple[int, ...] = ()) -> tuple[F32, F32]:
        slots = np.full(len(inputs["x"]), STRIDE)
        slots[list(padding)] = STRIDE - 1
        total, behind = self._program(**inputs, slots=slots, **self._arguments)
        return total, behind

    def expected(self, inputs: Mapping[str, F32]) -> F32:
        chosen, weights = route(EXPERTS, inputs["logits"])
        out = inputs["residual"].copy()
        x = self._read(inputs["x"])
        for token, its_experts in enumerate(chosen):
            for expert, weight in zip(its_experts, weights[token], strict=True):
                both = self.values[GATE_UP][expert] @ x[token] + self._bias(GATE_UP_BIAS, expert)
                made = self._read(gated(self._context.spec.blocks_of(MoE)[0].activation, both)[None])[0]
                out[token] += weight * (self.values[DOWN][expert] @ made + self._bias(DOWN_BIAS, expert))
        return out

    def _bias(self, name: str, expert: int) -> F32 | float:
        return self.values[name][expert] if self._has_biases else 0.0

    def _read(self, x: F32) -> F32:
        """X as matmuls take it."""
        narrow = rounded(x, self.act)
        return narrow if self._fp8 is None else rounded_to_fp8(narrow, self._fp8)


def make_weights(options: BuildOptions) -> dict[str, F32]:
    rng = np.random.default_rng(0)
    weights = {
        name: rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        for name, shape in SHAPES.items()
    }
    if options.weights == options.activations and options.weights != "f16":  # which saturates
        for value in weights.values():
            value[BROKEN] = np.nan
    return weights


def make_inputs(tokens: int, distinct: int = 1 << 20) -> dict[str, F32]:
    """By whose logits no token has the broken expert."""
    rng = np.random.default_rng(tokens)
    logits = rng.integers(0, distinct, (tokens, EXPERTS.count)) * 4 / distinct
    logits[:, BROKEN] = -1
    x, residual = rng.standard_normal((2, tokens, HIDDEN), np.float32)
    return {"x": x, "logits": logits.astype(np.float32), "residual": residual}


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [*((kind, "tokens") for kind in TOLERANCE), ("f32", 1), ("q4", 1), ("bf16", 40), ("fp8", 40)],
)
def test_only_the_chosen_experts_are_computed(
    kind: WeightType, tokens: int | str, chip: str, launch: Launch
) -> None:
    """The weights of the others may be NaN. Padding gets the residual alone."""
    if kind == "fp8" and resolve_target(f"hip:{chip}").fp8 is None:
        pytest.skip(f"{chip} does not multiply 8-bit floats")
    run = FeedForward(kind, tokens, chip, launch)
    for count in [3, 70] if isinstance(tokens, str) else [tokens]:
        inputs = make_inputs(count, distinct=3)
        padding = (0, 2) if count > 2 else ()
        inputs["logits"][list(padding), BROKEN] = 9
        total, behind = run(inputs, padding)
        inputs["logits"][list(padding), BROKEN] = -1
        kept = [token for token in range(count) if token not in padding]
        tolerance = TOLERANCE[kind]
        expected = run.expected(inputs)
        np.testing.assert_allclose(total[kept], expected[kept], rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(total[list(padding)], inputs["residual"][list(padding)])
        normal = total / np.sqrt(np.mean(total * total, axis=1, keepdims=True) + SPEC.rms_norm_eps)
        np.testing.assert_allclose(behind, normal, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("spec", [changed(SPEC, {"activation": "gelu"}), BIASED], ids=["gelu", "biased"])
def test_experts_may_have_other_activations(spec: ModelSpec, chip: str, launch: Launch) -> None:
    run, inputs = FeedForward("f32", 9, chip, launch, spec), make_inputs(9)
    np.testing.assert_allclose(run(inputs)[0], run.expected(inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 70])
def test_experts_may_be_in_floats_of_4_bits(tokens: int, chip: str, launch: Launch) -> None:
    run = FeedForward("q4", tokens, chip, launch, SPEC, dict.fromkeys(SHAPES, MXFP4))
    inputs = make_inputs(tokens)
    np.testing.assert_allclose(run(inputs)[0], run.expected(inputs), rtol=5e-2, atol=5e-2)


def test_a_token_has_the_same_bits_in_any_tile(chip: str, launch: Launch) -> None:
    inputs = make_inputs(150)
    together, _ = FeedForward("bf16", 150, chip, launch)(inputs)
    for tokens in (1, 40):
        some = {name: each[-tokens:] for name, each in inputs.items()}
        alone, _ = FeedForward("bf16", tokens, chip, launch)(some)
        np.testing.assert_array_equal(alone, together[-tokens:])
