"""Routed experts on vectors and on AMX, and their linalg form, against numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.builder.graph.batch import Batch, Slab
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.amx.experts import AmxExperts
from shortfin_apps.llm.builder.lowering.cpu.experts import VectorExperts
from shortfin_apps.llm.builder.lowering.linalg.experts import LinalgExperts
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, RenderedKernels
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.model.feed_forward import MoE, route
from shortfin_apps.llm.model.reference.pointwise import gated
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, WeightType, weight_shapes
from shortfin_apps.llm.model.weight_blocks import MXFP4, BlockType
from tests.builder.compiled_kernels import (
    F32,
    NARROW,
    NO_TILES,
    ConstantWeights,
    Inputs,
    function,
    load,
    narrow,
)
from tests.builder.compiled_model import GENERIC, HOST, ROUTED
from tests.builder.emulated_tiles import EMULATED, has_the_rest, load_emulated
from tests.builder.specs import changed, with_experts
from tests.matrices import slow_but

EXPERTS = MoE(count=7, per_token=3, features=96)
SPEC = with_experts(ROUTED, EXPERTS)
BROKEN = 5  # the expert whose weights are NaN in half of the functions
STRIDE = 16
ROWS = [1, 2, 9, 40, 130]
TOLERANCE: dict[WeightType, float] = {"f32": 1e-5, "bf16": 2e-2, "f16": 3e-3, "q8_0": 2e-2, "q4": 2e-2}
KINDS: list[WeightType] = ["f32", "bf16", "q8_0", "q4"]
GATE_UP, DOWN = "blk.1.ffn_gate_up_exps.weight", "blk.1.ffn_down_exps.weight"
GATE_UP_BIAS, DOWN_BIAS = "blk.1.ffn_gate_up_exps.bias", "blk.1.ffn_down_exps.bias"
# Of gpt-oss; 48 features are half a panel more than one.
BIASED = changed(SPEC, {"hidden_size": 48, "activation": "clamped", "biases": True})
OWN_BLOCKS = [BlockType(4, has_minima=True, group=256), BlockType(8, 16, group=256), MXFP4]  # of Q4_K, Q6_K
FORMS: list[tuple[str, Target, WeightType]] = [
    *(("host", NO_TILES, kind) for kind in KINDS),
    *(("narrow", NARROW, kind) for kind in KINDS),
    ("linalg", GENERIC, "f32"),
    ("linalg", GENERIC, "bf16"),
]
if HOST.has_amx:
    FORMS.append(("amx", HOST, "bf16"))
if has_the_rest():
    FORMS += [("emulated-amx", EMULATED, "bf16"), ("emulated-amx", EMULATED, "f16")]


@dataclass(frozen=True)
class Experts:
    """A feed-forward of experts, of which one is broken, with the weights they are worth."""

    spec: ModelSpec
    kind: WeightType
    weights: dict[str, F32]
    module: Any

    def __call__(self, x: F32, logits: F32, residual: F32, padding: tuple[int, ...] = ()) -> F32:
        slots = np.full((len(x), 1), STRIDE, np.float32)
        slots[list(padding)] = STRIDE - 1
        made: F32 = self.module.feed_forward(x, logits, residual, slots).to_host()
        return made

    def expected(self, x: F32, logits: F32, residual: F32) -> F32:
        chosen, weights = route(EXPERTS, logits)
        out = residual.copy()
        for token, its_experts in enumerate(chosen):
            for expert, weight in zip(its_experts, weights[token], strict=True):
                both = self.weights[GATE_UP][expert] @ x[token] + self._bias(GATE_UP_BIAS, expert)
                made = self.weights[DOWN][expert] @ gated(
                    self.spec.blocks_of(MoE)[0].activation, both
                ) + self._bias(DOWN_BIAS, expert)
                out[token] += weight * made
        return out

    def _bias(self, name: str, expert: int) -> F32 | float:
        return self.weights[name][expert] if name in self.weights else 0.0


def _id(form: tuple[str, Target, WeightType]) -> str:
    return f"{form[0]}-{form[2]}"


# linalg computes padding too, and its sums depend on the number of rows.
only_vectors = pytest.mark.parametrize(
    "experts",
    slow_but(FORMS[::5], (form for form in FORMS if form[0] != "linalg")),
    ids=_id,
    indirect=True,
)


@pytest.fixture(scope="module", params=slow_but(FORMS[::5], FORMS), ids=_id)
def experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Experts:
    form, target, kind = request.param
    return build(form, target, kind, tmp_path_factory.mktemp("experts"))


def build(
    form: str,
    target: Target,
    kind: WeightType,
    folder: Path,
    spec: ModelSpec = SPEC,
    blocks: BlockType | None = None,
) -> Experts:
    own = () if blocks is None else ((GATE_UP, blocks), (DOWN, blocks))
    options = BuildOptions(weights=kind, block_seq_stride=STRIDE, block_types=own)
    rendered, weights = RenderedKernels(), make_weights(spec, options, target)
    experts = spec.experts
    assert experts
    context = LoweringContext(spec, options, target, weights, rendered)
    kernels: Any = LinalgExperts(context)
    if form != "linalg":
        kernels = AmxExperts(context) if form.endswith("amx") else VectorExperts(context)

    def feed_forward(e: Emitter, x: Tensor, logits: Tensor, residual: Tensor, slots: Tensor) -> list[Tensor]:
        batch = Batch.__new__(Batch)
        batch.slab = Slab.__new__(Slab)
        integers = "  %y = arith.fptosi %a : f32 to i64\n  linalg.yield %y : i64"
        batch.slots = e.elementwise("t", ("t", x.shape[:1], "i64"), [(slots, "t0")], integers)
        routing = kernels.route(e, logits, batch)
        biases = (GATE_UP_BIAS, DOWN_BIAS) if experts.biases else (None, None)
        narrowed = narrow(e, x, options.activations)
        made = kernels.gated_experts(e, narrowed, GATE_UP, biases[0], routing)
        return [kernels.sum_experts(e, made, DOWN, biases[1], routing, residual)]

    hidden = spec.hidden_size
    inputs: Inputs = {
        "x": ("?", hidden),
        "logits": ("?", EXPERTS.count),
        "residual": ("?", hidden),
        "slots": ("?", 1),
    }
    body = function("feed_forward", inputs, feed_forward)
    text = "\n".join(["module @kernels {", *weights.declarations(), *rendered.texts.values(), body, "}"])
    loaded = load_emulated(text, folder) if target is EMULATED else load(text, folder)
    return Experts(spec, kind, weights.values, loaded)


def make_weights(spec: ModelSpec, options: BuildOptions, target: Target) -> ConstantWeights:
    rng = np.random.default_rng(0)
    names = (GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS)
    shapes = {name: shape for name, shape in weight_shapes(spec).items() if name in names}
    weights = {
        name: (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name in {GATE_UP_BIAS, DOWN_BIAS} & shapes.keys():
        weights[name] *= 60  # some of what is gated has to be past the limits
    if options.weights == options.activations:  # blocks have no NaN
        for value in weights.values():
            value[BROKEN] = np.nan
    return ConstantWeights(weights, {name: weight_layout(name, spec, options, target) for name in shapes})


def inputs(rows: int, distinct: int = 1 << 20, hidden: int = SPEC.hidden_size) -> tuple[F32, F32, F32]:
    """x, logits of which few are distinct, by which no token has the broken expert, and the residual."""
    rng = np.random.default_rng(rows)
    x, residual = rng.standard_normal((2, rows, hidden)).astype(np.float32)
    x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)  # which bf16 holds
    logits = rng.integers(0, distinct, (rows, EXPERTS.count)).astype(np.float32) * 4 / distinct
    logits[:, BROKEN] = -1.0
    return x, logits.astype(np.float32), residual


@pytest.mark.parametrize("distinct", [2, 1 << 20], ids=["ties", "no-ties"])
@pytest.mark.parametrize("rows", ROWS)
def test_only_the_chosen_experts_are_computed(experts: Experts, rows: int, distinct: int) -> None:
    """Those with the lower index of equally likely ones; weights of the others may be NaN."""
    given = inputs(rows, distinct)
    tolerance = TOLERANCE[experts.kind]
    np.testing.assert_allclose(experts(*given), experts.expected(*given), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS[::4], ids=_id)
def test_experts_may_have_gelu(form: tuple[str, Target, WeightType], tmp_path: Path) -> None:
    experts, given = build(*form, tmp_path, changed(SPEC, {"activation": "gelu"})), inputs(9)
    tolerance = TOLERANCE[experts.kind]
    np.testing.assert_allclose(experts(*given), experts.expected(*given), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in FORMS if form[2] in ("f32", "bf16", "f16")], ids=_id)
def test_experts_may_have_biases_and_the_activation_of_gpt_oss(
    form: tuple[str, Target, WeightType], tmp_path: Path
) -> None:
    spec = replace(BIASED, hidden_size=64) if form[0].endswith("amx") else BIASED  # whole panels
    experts, given = build(*form, tmp_path, spec), inputs(90, hidden=spec.hidden_size)
    tolerance = 3 * TOLERANCE[experts.kind]  # what is gated is larger than without biases
    np.testing.assert_allclose(experts(*given), experts.expected(*given), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", OWN_BLOCKS, ids=str)
@pytest.mark.parametrize("target", [NO_TILES, NARROW], ids=["host", "narrow"])
def test_experts_may_have_blocks_of_their_own(target: Target, blocks: BlockType, tmp_path: Path) -> None:
    spec = changed(SPEC, {"hidden_size": 256, "features": 256})
    experts, given = build("host", target, "q4", tmp_path, spec, blocks), inputs(9, hidden=256)
    np.testing.assert_allclose(experts(*given), experts.expected(*given), rtol=2e-2, atol=2e-2)


@only_vectors
def test_a_token_has_the_same_bits_beside_any_others(experts: Experts) -> None:
    given = inputs(130)
    together = experts(*given)
    for token in (0, 64, 129):
        x, logits, residual = (each[token : token + 1] for each in given)
        alone = experts(x, logits, residual)
        np.testing.assert_array_equal(alone[0], together[token])


@only_vectors
def test_padding_has_no_experts(experts: Experts) -> None:
    x, logits, residual = inputs(9)
    logits[[2, 8], BROKEN] = 9.0
    made = experts(x, logits, residual, padding=(2, 8))
    expected = experts.expected(x, logits, residual)
    kept = [0, 1, 3, 4, 5, 6, 7]
    tolerance = TOLERANCE[experts.kind]
    np.testing.assert_allclose(made[kept], expected[kept], rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(made[[2, 8]], residual[[2, 8]])


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_token_that_is_not_a_number_spoils_only_itself(experts: Experts, broken: float) -> None:
    x, logits, residual = inputs(9)
    expected = experts(x, logits, residual)
    spoilt = logits.copy()
    spoilt[3, 1], spoilt[4] = broken, np.nan
    made = experts(x, spoilt, residual)
    others = [0, 1, 2, 5, 6, 7, 8]
    np.testing.assert_array_equal(made[others], expected[others])
    assert np.isnan(made[[3, 4]]).all()
