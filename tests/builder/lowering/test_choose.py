"""The kernels chosen for each target, type and shape, one kind of operation at a time."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.choose import (
    CANDIDATES,
    EXPERTS,
    FUSED_LAYER,
    Candidate,
    choose,
    make_lowering,
)
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, Values
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.feed_forward import MoE
from shortfin_apps.llm.model.operations import Linear, Norm, TopK
from shortfin_apps.llm.model.spec import ActivationBits, BuildOptions, ModelSpec, WeightType
from shortfin_apps.llm.model.weight_blocks import Q4_1
from tests.builder.compiled_kernels import ConstantWeights, function, load
from tests.builder.compiled_model import GENERIC, HOST, HYBRID, ROUTED, TINY
from tests.builder.specs import changed, with_experts

TILES = changed(TINY, {"head_dim": 32})  # fills the tiles of AMX
assert HYBRID.delta_net is not None
HUGE_STATES = changed(HYBRID, {"key_dim": 257, "value_dim": 256})
ODD = MoE(count=4, per_token=2, features=40)
ODD_SHARED = MoE(count=4, per_token=2, features=48, shared=40)
AMX = resolve_target("cpu:sapphirerapids")
AMX_BF16 = replace(AMX, features=AMX.features - {"amx-int8"})
AMX_FP16 = resolve_target("cpu:graniterapids")
VNNI = resolve_target("cpu:znver4")
HASWELL = resolve_target("cpu:haswell")
SKYLAKE = resolve_target("cpu:skylake-avx512")  # AVX-512 without VNNI
ARM = resolve_target("cpu:neoverse-v1")
ARM_WITHOUT_DOT = resolve_target("cpu:cortex-a72")
HAVE_BYTES = (HASWELL, SKYLAKE, ARM)
GPU = resolve_target("hip:gfx942")
ON_CPU = {"Embed": "linalg", "LastTokens": "linalg", "TopK": "cpu/top_k", "Sample": "cpu/sampling"}
FEATURES = changed(  # with every operation on single values or heads
    TILES, {"bias": True, "qk_norm": True, "norm_before": False, "norm_after": True, "logit_cap": 6.0}
)


def between_attentions(name: str) -> dict[str, str]:
    return dict.fromkeys(("Norm", "Linear", "GatedLinear"), name)


FUSED, INT8 = between_attentions("fused/layer"), between_attentions("cpu/matmul_int8")
VECTORS = {"Norm": "cpu/rms_norm", "Linear": "cpu/matmul", "GatedLinear": "cpu/matmul"}
BF16_ATTENTION, VECTOR_ATTENTION = {"Attend": "avx512/paged_attention"}, {"Attend": "cpu/paged_attention"}


def context(spec: ModelSpec, options: BuildOptions, target: Target) -> LoweringContext:
    return LoweringContext(spec, options, target, WeightTypes(spec, options, target))


@pytest.mark.parametrize(
    ("target", "spec", "options", "expected"),
    [
        (AMX, TILES, BuildOptions(), FUSED | BF16_ATTENTION),
        (AMX, TILES, BuildOptions(weights="int8"), FUSED | BF16_ATTENTION),
        (AMX, TINY, BuildOptions(), FUSED | VECTOR_ATTENTION),
        (AMX, TILES, BuildOptions(kv="f16"), FUSED | VECTOR_ATTENTION),
        (AMX, TILES, BuildOptions(kv="q8_0"), FUSED | BF16_ATTENTION),
        (AMX, changed(TILES, {"head_dim": 512}), BuildOptions(kv="q8_0"), FUSED | BF16_ATTENTION),
        (AMX, changed(TILES, {"head_dim": 544}), BuildOptions(kv="q8_0"), FUSED | VECTOR_ATTENTION),
        (AMX, TILES, BuildOptions(block_seq_stride=8), FUSED | VECTOR_ATTENTION),
        (AMX, changed(TILES, {"cap": 50.0}), BuildOptions(), FUSED | BF16_ATTENTION),
        (AMX, changed(TILES, {"sinks": True}), BuildOptions(), FUSED | BF16_ATTENTION),
        (AMX, TILES, BuildOptions(weights="f32"), FUSED | VECTOR_ATTENTION),
        (AMX, replace(TILES, hidden_size=48), BuildOptions(), VECTORS | BF16_ATTENTION),
        (AMX, changed(TILES, {"features": 48}), BuildOptions(), VECTORS | BF16_ATTENTION),
        (AMX, replace(TILES, vocab_size=48), BuildOptions(), VECTORS | BF16_ATTENTION),
        (AMX_BF16, TILES, BuildOptions(), FUSED | BF16_ATTENTION),
        (VNNI, TILES, BuildOptions(weights="int8"), FUSED | BF16_ATTENTION),
        (VNNI, TILES, BuildOptions(weights="q8_0"), FUSED | BF16_ATTENTION),
        (AMX_BF16, TILES, BuildOptions(weights="q4"), FUSED | BF16_ATTENTION),
        (VNNI, replace(TILES, vocab_size=48), BuildOptions(weights="q4"), VECTORS | BF16_ATTENTION),
        (VNNI, TILES, BuildOptions(), FUSED | BF16_ATTENTION),
        (HASWELL, TILES, BuildOptions(weights="q4"), FUSED | VECTOR_ATTENTION),
        (HASWELL, TILES, BuildOptions(), FUSED | VECTOR_ATTENTION),
        (ARM, TILES, BuildOptions(), FUSED | VECTOR_ATTENTION),
        (ARM, TINY, BuildOptions(weights="f16"), FUSED | VECTOR_ATTENTION),
        (VNNI, replace(TILES, vocab_size=48), BuildOptions(weights="int8"), INT8 | BF16_ATTENTION),
        *((each, TILES, BuildOptions(weights="int8"), FUSED | VECTOR_ATTENTION) for each in HAVE_BYTES),
        *((each, TILES, BuildOptions(weights="q4"), FUSED | VECTOR_ATTENTION) for each in (SKYLAKE, ARM)),
        (ARM_WITHOUT_DOT, TILES, BuildOptions(weights="q4"), VECTORS | VECTOR_ATTENTION),
    ],
)
def test_kernels_of_a_cpu(
    target: Target, spec: ModelSpec, options: BuildOptions, expected: dict[str, str]
) -> None:
    choices = choose(context(spec, options, target))
    assert {choice.kind.__name__: choice.candidate.name for choice in choices} == ON_CPU | expected


@pytest.mark.parametrize(
    ("target", "weights", "name"),
    [
        (AMX, "bf16", "amx/experts"),
        (AMX, "f16", "cpu/experts"),
        (AMX_FP16, "f16", "amx/experts"),
        (AMX, "q8_0", "cpu/experts"),
        (VNNI, "bf16", "cpu/experts"),
        (GPU, "bf16", "triton/layers"),
        (GENERIC, "bf16", "linalg/experts"),
    ],
)
def test_experts_have_kernels_of_their_own(target: Target, weights: WeightType, name: str) -> None:
    given = context(ROUTED, BuildOptions(weights=weights), target)
    choices = {choice.kind: choice.candidate.name for choice in choose(given)}
    assert {choices[kind] for kind in EXPERTS} == {name}
    assert FUSED["Linear"] not in choices.values()


def test_a_decode_attends_within_the_fused_layer() -> None:
    joined, apart = (
        [str(choice) for choice in choose(context(spec, BuildOptions(), AMX))]
        for spec in (TILES, replace(TILES, vocab_size=48))
    )
    assert any("a decode's is a stage of fused/layer" in line for line in joined)
    assert not any("a decode's" in line for line in apart)


def test_a_gpu_takes_triton_and_linalg_what_is_left() -> None:
    choices = {choice.kind: choice for choice in choose(context(FEATURES, BuildOptions(), GPU))}
    linalg = {kind.__name__ for kind, choice in choices.items() if choice.candidate.name == "linalg"}
    assert linalg == {"AddBias", "NormHeads", "Narrow", "CapLogits"}
    assert choices[TopK].candidate.name == "triton/top_k"
    assert choices[Linear].candidate.name == "triton/layers"
    assert "; not cpu/rms_norm, which needs a CPU" in str(choices[Norm])


def test_a_gpu_takes_linalg_where_triton_lacks_the_size_and_the_reason_is_given() -> None:
    odd = replace(TILES, hidden_size=72)
    choices = {choice.kind: choice for choice in choose(context(odd, BuildOptions(), GPU))}
    assert {choice.candidate.name for choice in choices.values()} == {
        *("linalg", "triton/sampling", "triton/top_k")
    }
    assert "; not triton/layers, which needs hidden_size in multiples of 16" in str(choices[Linear])


def test_a_build_for_a_gpu_without_triton_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    given = context(TILES, BuildOptions(), GPU)
    with pytest.raises(BuildError, match=r"needs Triton to build, .*pip install 'shortfin-llm\[gpu-build\]'"):
        make_lowering(given, choose(given))


def test_the_reason_names_what_was_there_and_what_was_not() -> None:
    odd = replace(TILES, vocab_size=48)
    choices = {choice.kind: str(choice) for choice in choose(context(odd, BuildOptions(), VNNI))}
    assert choices[Norm] == (
        "Norm: cpu/rms_norm, given a CPU; not fused/layer, which needs sizes in multiples of 32; "
        "not cpu/matmul_int8, which needs weights in int8"
    )


@pytest.mark.parametrize(
    ("target", "spec", "weights", "message"),
    [
        (ARM_WITHOUT_DOT, TILES, "int8", "int8 needs .* which cortex-a72 is not; use q8_0"),
        (VNNI, replace(TILES, hidden_size=80), "int8", "multiples of 32, not 80; use q8_0"),
        (VNNI, changed(TILES, {"features": 40}), "bf16", "intermediate_size 40 is not a multiple of 16"),
        (GPU, TILES, "int8", "weights in int8 are for CPUs"),
        (VNNI, ROUTED, "int8", "int8 are not for models with routed experts; use q8_0"),
        (VNNI, with_experts(ROUTED, ODD), "bf16", "size of an expert 40 is not a multiple of 16"),
        (VNNI, with_experts(ROUTED, ODD_SHARED), "bf16", "size of the shared expert 40 is not a multiple"),
        (
            GENERIC,
            HYBRID,
            "bf16",
            "nothing computes DeltaRule on generic: .* triton/delta_net, .* a GPU",
        ),
        (VNNI, HYBRID, "int8", "int8 are not for models with gated delta nets; use q8_0"),
        (
            GPU,
            HUGE_STATES,
            "bf16",
            "nothing computes DeltaRule on hip:gfx942: .* at most 65536 elements a head",
        ),
        (VNNI, TILES, "fp8", "weights in fp8 are for GPUs"),
        (replace(GPU, cpu="gfx1100"), TILES, "fp8", "gfx1100 does not multiply 8-bit floats; use q8_0"),
        (GPU, replace(TILES, hidden_size=72), "q8_0", "not triton/layers, .* hidden_size in multiples of 16"),
        (
            GPU,
            changed(TILES, {"features": 48}),
            "q4",
            "layers, .* input features in multiples of 32",
        ),
    ],
)
def test_refuses_what_no_kernel_takes(
    target: Target, spec: ModelSpec, weights: WeightType, message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        choose(context(spec, BuildOptions(weights=weights), target))


@pytest.mark.parametrize(
    ("target", "spec", "weights"),
    [
        (VNNI, TILES, "bf16"),
        (VNNI, TILES, "int8"),
        (VNNI, ROUTED, "q4"),
        (ARM_WITHOUT_DOT, TILES, "q8_0"),
        (GPU, TILES, "q4"),
    ],
)
@pytest.mark.parametrize("bits", [8, 12, 16])
def test_refuses_bits_where_activations_are_not_in_blocks(
    bits: ActivationBits, target: Target, spec: ModelSpec, weights: WeightType
) -> None:
    options = BuildOptions(weights=weights, activation_bits=bits)
    with pytest.raises(BuildError, match=f"--activation-bits does not apply to {weights} .*: leave it out"):
        choose(context(spec, options, target))


def test_bits_are_for_weights_in_blocks_on_every_cpu_that_multiplies_them() -> None:
    for target in (VNNI, AMX):
        assert choose(context(TILES, BuildOptions(weights="q4", activation_bits=8), target))
    own = BuildOptions(block_types=(("blk.0.ffn_down.weight", Q4_1),), activation_bits=12)
    assert choose(context(TILES, own, VNNI))


def test_activations_of_16_bits_are_for_amx() -> None:
    options = BuildOptions(weights="q4", activation_bits=16)
    assert choose(context(TILES, options, AMX))
    with pytest.raises(BuildError, match=r"--activation-bits 16 .* AMX, .* lacks: leave it out"):
        choose(context(TILES, options, VNNI))


def test_no_candidate_is_an_error_that_names_the_kind() -> None:
    with pytest.raises(BuildError, match=r"nothing computes Linear on cpu.*linalg, which needs row-major"):
        choose(context(TINY, BuildOptions(), HOST), [c for c in CANDIDATES if c.name == "linalg"])


class TwiceTheNorm:
    """A kernel of Norm alone, whose results give it away."""

    def rms_norm(self, e: Emitter, x: Tensor, weight: str) -> Tensor:
        body = "  %y = arith.addf %a, %a : f32\n  linalg.yield %y : f32"
        return e.elementwise("td", ("td", x.shape, "f32"), [(x, "td")], body)


NEW = Candidate("test/norm", (Norm,), lambda c: {"f32": c.options.weights == "f32"}, lambda _: TwiceTheNorm())
ALONE = [candidate for candidate in CANDIDATES if candidate is not FUSED_LAYER]
WITHOUT_NORM = [candidate for candidate in ALONE if candidate.name != "cpu/rms_norm"]


@pytest.mark.parametrize("target", [HOST, GENERIC], ids=["cpu", "generic"])
@pytest.mark.parametrize(("candidates", "name"), [([NEW, *ALONE], "test/norm"), (WITHOUT_NORM, "linalg")])
def test_one_operation_alone_takes_another_kernel(
    target: Target, candidates: list[Candidate], name: str, tmp_path: Path
) -> None:
    """A new kernel of one target, or linalg's for an operation that a target has none for."""
    options = BuildOptions(weights="f32")
    weights = projection_weights(options, target)
    lowered = LoweringContext(TINY, options, target, weights)
    choices = choose(lowered, candidates)
    assert {c.kind: c.candidate.name for c in choices}[Norm] == name
    lowering = make_lowering(lowered, choices)

    def project(e: Emitter, x: Tensor) -> list[Tensor]:
        values = Values({"x": x})
        lowering.lower(e, list(TINY.operations())[1:3], values, ["qkv"])
        return [values["qkv"]]

    run = function("run", {"x": ("?", TINY.hidden_size)}, project)
    parts = [*weights.declarations(), *lowering.declarations(), run]
    x = np.random.default_rng(1).standard_normal((5, TINY.hidden_size)).astype(np.float32)
    actual = load("\n".join(["module @test {", *parts, "}"]), tmp_path).run(x).to_host()
    norm, linear = weights.values.values()
    normed = 2 * x if name == "test/norm" else x / np.sqrt(np.mean(x * x, 1, keepdims=True) + 1e-5) * norm
    np.testing.assert_allclose(actual, normed @ linear.T, rtol=1e-4, atol=1e-4)


def projection_weights(options: BuildOptions, target: Target) -> ConstantWeights:
    types = WeightTypes(TINY, options, target)
    rng = np.random.default_rng(0)
    names = [o.weight for o in list(TINY.operations())[1:3] if isinstance(o, Norm | Linear)]
    values = {name: rng.standard_normal(types.shape(name)).astype(np.float32) for name in names}
    return ConstantWeights(values, {name: types.layout(name) for name in names})
