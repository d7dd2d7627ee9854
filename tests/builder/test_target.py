"""Compiles every kernel, also for CPUs that this machine is not."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import jinja2
import jinja2.meta
import pytest

from shortfin_apps.llm.builder import kernels
from shortfin_apps.llm.builder import target as target_module
from shortfin_apps.llm.builder.lowering import lowering
from shortfin_apps.llm.builder.program.module import ModelModule
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.host_cpu import HostCpu, decisive_features, this_host
from shortfin_apps.llm.contract.iree_release import OF_SHORTFIN, Release
from shortfin_apps.llm.model.feed_forward import MoE
from shortfin_apps.llm.model.kv_layout import KVType
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, WeightType
from shortfin_apps.llm.model.weight_blocks import MXFP4
from tests.builder.compiled_model import HYBRID, TINY
from tests.builder.specs import changed, with_experts
from tests.compiled_programs import compile_program
from tests.conftest import BuildTiny
from tests.kernel_families import note_compiled
from tests.matrices import slow_rows_but

AMX, WIDE, NARROW, ARM = "cpu:sapphirerapids", "cpu:znver4", "cpu:haswell", "cpu:neoverse-v1"
NO_VNNI, AMX_FP16 = "cpu:skylake-avx512", "cpu:graniterapids"
X86_NAMES = ("x86-64-v3", "x86-64-v4", "haswell", "znver4", "znver5", "sapphirerapids", "graniterapids")
ARM_NAMES = ("aarch64", "neoverse-v1", "neoverse-v2", "apple-m1")
# Those of which no test reads the instructions, or runs the kernels on any CPU with AVX-512.
CASES: list[tuple[str, WeightType]] = [
    *((AMX, "f32"), (AMX, "bf16"), (AMX, "q8_0"), (AMX, "q4"), (AMX, "int8"), (NO_VNNI, "int8")),
    *((NARROW, "f16"), (NARROW, "int8"), (ARM, "f32"), (ARM, "f16"), (ARM, "q4")),
]
# Whole tiles; a first layer and a last.
SPEC = changed(TINY, {"head_dim": 32})
# Attention uses AMX here, in layers of either kind, and matmuls do not.
UNEVEN = changed(SPEC, {"hidden_size": 80, "cap": 30.0}, at={1: {"window": 40}})
# A vocabulary that the fused layer does not take.
HALF_A_PANEL = replace(SPEC, vocab_size=48)
ROUTED = with_experts(
    changed(SPEC, {"activation": "clamped", "sinks": True}),
    MoE(count=7, per_token=3, features=96, biases=True),
)
OWN_BLOCKS = (("blk.0.ffn_down_exps.weight", MXFP4),)


def module(device: str, weights: WeightType, spec: ModelSpec = SPEC, kv: KVType = "bf16") -> str:
    options = BuildOptions(
        device=device,
        weights=weights,
        kv=kv,
        prefill_batch_sizes=(2,),
        decode_batch_sizes=(2,),
        decode_loop_sizes=(2,),
        chunk_sizes=(),
        top_k=4,
        block_types=OWN_BLOCKS if weights == "q4" and spec is ROUTED else (),
    )
    return ModelModule(spec, options, resolve_target(device)).text()


def check_compiles(device: str, text: str) -> None:
    target = resolve_target(device)
    assert compile_program(text, target).stat().st_size > 0
    note_compiled(text, target.architecture)


@pytest.mark.parametrize(("device", "weights"), slow_rows_but([(ARM, "q4")], CASES))
def test_compiles_for_another_cpu(device: str, weights: WeightType) -> None:
    check_compiles(device, module(device, weights))


@pytest.mark.slow
def test_compiles_amx_attention_together_with_vector_kernels() -> None:
    check_compiles(AMX, module(AMX, "bf16", UNEVEN))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "weights"),
    [(AMX, "bf16"), (AMX_FP16, "f16"), (WIDE, "q4"), (NARROW, "bf16"), (ARM, "q4")],
)
def test_compiles_routed_experts_for_another_cpu(device: str, weights: WeightType) -> None:
    check_compiles(device, module(device, weights, ROUTED))


@pytest.mark.slow
@pytest.mark.parametrize("device", [NARROW, ARM])
def test_compiles_keys_and_values_in_bytes_for_another_cpu(device: str) -> None:
    check_compiles(device, module(device, "bf16", kv="q8_0"))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "weights"), [(AMX, "bf16"), (WIDE, "q4"), (NARROW, "bf16"), (ARM, "q4")])
def test_compiles_gated_delta_nets_for_another_cpu(device: str, weights: WeightType) -> None:
    check_compiles(device, module(device, weights, HYBRID))


def test_these_cases_render_every_template(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: set[str] = set()

    def render(template: str, name: str, **parameters: Any) -> str:
        rendered.add(f"{template}.mlir.j2")
        return kernels.render(template, name, **parameters)

    monkeypatch.setattr(lowering, "render", render)
    for device, weights in product((AMX, WIDE, NO_VNNI, NARROW, ARM), get_args(WeightType)):
        if weights != "fp8":
            module(device, weights)
    module(AMX, "bf16", UNEVEN)
    module(WIDE, "int8", HALF_A_PANEL)
    for device in (AMX, WIDE):
        module(device, "bf16", ROUTED)
    module(WIDE, "bf16", HYBRID)
    loader = jinja2.Environment(loader=jinja2.PackageLoader(kernels.__name__, "."))
    templates = {name for name in loader.list_templates() if name.endswith(".j2")}
    assert _with_references(rendered, loader) == templates


def _with_references(names: set[str], environment: jinja2.Environment) -> set[str]:
    """The templates, and the ones they import."""
    assert environment.loader is not None
    found: set[str] = set()
    waiting = set(names)
    while waiting:
        found |= waiting
        sources = [environment.loader.get_source(environment, name)[0] for name in waiting]
        referenced = {
            name
            for source in sources
            for name in jinja2.meta.find_referenced_templates(environment.parse(source))
            if name is not None
        }
        waiting = referenced - found
    return found


@pytest.mark.parametrize("device", ["cpu:nehalem", "cpu:cortex-a72"])
def test_int8_needs_instructions_for_bytes(device: str) -> None:
    with pytest.raises(BuildError, match=f"int8 needs .* which {device.removeprefix('cpu:')} is not"):
        module(device, "int8")


@pytest.mark.parametrize(
    ("device", "architecture", "feature"), [(ARM, "arm_64", "neon"), (NARROW, "x86_64", "avx2")]
)
def test_cpus_of_both_architectures_are_resolved_by_name(
    device: str, architecture: str, feature: str
) -> None:
    target = resolve_target(device)
    assert (target.architecture, target.cpu) == (architecture, device.removeprefix("cpu:"))
    assert feature in target.features


def test_generic_has_this_hosts_architecture() -> None:
    assert resolve_target("cpu:generic").architecture == resolve_target("cpu").architecture


def test_generic_aarch64_has_a_name_on_any_host() -> None:
    target = resolve_target("cpu:aarch64")
    assert (target.architecture, target.cpu) == ("arm_64", "generic")
    assert not decisive_features(target.features)


@pytest.mark.parametrize("cpu", [*X86_NAMES, *ARM_NAMES])
def test_every_named_cpu_says_what_it_needs(cpu: str) -> None:
    target = resolve_target(f"cpu:{cpu}")
    assert target.architecture == ("x86_64" if cpu in X86_NAMES else "arm_64")
    baseline = HostCpu(target.architecture, frozenset({"fpu", "fp", "asimd"}))
    assert bool(baseline.missing(target.features)) is (cpu != "aarch64")


def test_a_program_for_another_cpu_says_what_it_needs(build_tiny: BuildTiny) -> None:
    options = BuildOptions(device="cpu:aarch64", prefill_batch_sizes=(1,), decode_batch_sizes=(1, 4))
    manifest = build_tiny(options).manifest
    assert manifest is not None
    target = resolve_target(options.device)
    assert manifest.program.target.architecture == "arm_64"
    assert frozenset(manifest.program.target.features) == target.features


def test_the_last_mention_of_a_feature_counts() -> None:
    """As of a virtual machine that has less than its CPU's model, with IREE 3.13."""
    assert target_module._enabled("+avx512bf16,+avx2,+amx-tile,-avx512bf16,-amx-tile,-sha") == {"avx2"}
    assert target_module._enabled("") == set()


def test_this_host_has_what_is_compiled_for_it() -> None:
    assert this_host().missing(sorted(resolve_target("cpu").features)) == []


def test_an_unknown_cpu_is_refused() -> None:
    with pytest.raises(BuildError, match=r"no CPU 'nosuchcpu'.* as in cpu:znver4") as caught:
        resolve_target("cpu:nosuchcpu")
    assert "\n" not in str(caught.value)


NEWEST = Release(3, 13)


@pytest.fixture
def newest_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "compiler_release", lambda: NEWEST)


@pytest.mark.parametrize(
    ("release", "flag"), [(OF_SHORTFIN, "--iree-hip-target=gfx942"), (NEWEST, "--iree-rocm-target=gfx942")]
)
def test_amds_chips_are_named_as_the_compiler_takes_them(
    release: Release, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_module, "compiler_release", lambda: release)
    assert resolve_target("hip:gfx942").flags == ("--iree-hal-target-device=hip", flag)


@pytest.mark.usefixtures("newest_compiler")
@pytest.mark.parametrize(
    ("chip", "compiled_for"),
    [("sm_80", "sm_80"), ("sm_90", "sm_89"), ("sm_90a", "sm_89"), ("sm_100", "sm_89"), ("sm_121", "sm_120")],
)
def test_nvidias_chips_run_code_for_the_next_older_one_that_the_compiler_knows(
    chip: str, compiled_for: str
) -> None:
    target = resolve_target(f"cuda:{chip}")
    assert f"--iree-cuda-target={compiled_for}" in target.flags
    assert (target.architecture, target.cpu, target.is_cpu) == ("nvptx", chip, False)


@pytest.mark.usefixtures("newest_compiler")
@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cuda:sm_75", r"sm_75 is too old; .* from sm_80 on"),
        ("cuda:h200", r"as in cuda:sm_90"),
        ("cuda", "cuda:sm_90"),
    ],
)
def test_other_chips_of_nvidia_are_refused(device: str, reason: str) -> None:
    with pytest.raises(BuildError, match=reason):
        resolve_target(device)


def test_the_compiler_of_shortfins_release_has_no_nvidia_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "compiler_release", lambda: OF_SHORTFIN)
    with pytest.raises(BuildError, match=r"newer compiler than IREE 3\.9's.*`make newest-install`"):
        resolve_target("cuda:sm_90")


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("hip:gfx942", "f8E4M3FNUZ"),
        ("hip:gfx950", "f8E4M3FN"),
        ("hip:gfx1201", "f8E4M3FN"),
        ("hip:gfx1100", None),
        ("hip:gfx90a", None),
        ("cuda:sm_90a", "f8E4M3FN"),
        ("cuda:sm_86", None),
        ("cpu", None),
    ],
)
def test_8_bit_floats_are_of_the_kind_that_matrix_instructions_multiply(
    newest_compiler: None, device: str, expected: str | None
) -> None:
    assert resolve_target(device).fp8 == expected


@pytest.mark.parametrize(
    ("cpu", "multiplies", "has_dot"),
    [
        ("znver4", True, True),
        ("cascadelake", True, True),
        ("skylake-avx512", True, False),
        ("knl", False, False),
        ("alderlake", True, True),
        ("haswell", True, False),
        ("znver5", True, True),
        ("x86-64-v3", True, False),
        ("x86-64-v4", True, False),
        ("nehalem", False, False),
        ("neoverse-v1", True, True),
        ("neoverse-v2", True, True),
        ("apple-m1", True, True),
        ("cortex-a72", False, False),
    ],
)
def test_blocks_are_multiplied_as_integers_where_kernels_can(
    cpu: str, multiplies: bool, has_dot: bool
) -> None:
    target = resolve_target(f"cpu:{cpu}")
    assert (target.multiplies_blocks, target.has_block_dot) == (multiplies, has_dot)


@pytest.mark.parametrize(
    ("cpu", "wide"),
    [
        ("znver4", True),
        ("znver5", True),
        ("graniterapids", True),
        ("skylake-avx512", True),
        ("x86-64-v4", True),
        ("x86-64-v3", False),
        ("alderlake", False),
        ("neoverse-v2", False),
    ],
)
def test_vectors_are_wide_where_the_cpu_has_avx_512(cpu: str, wide: bool) -> None:
    assert resolve_target(f"cpu:{cpu}").has_wide_vectors is wide
