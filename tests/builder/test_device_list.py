from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.builder import device_list
from shortfin_apps.llm.builder.device_list import preference, resolve_targets
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.contract.device_names import join_devices, name_of
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.host_cpu import decisive_features

X86 = ("avx", "avx2", "fma", "avx512f", "avx512vnni", "amx-tile", "amx-bf16", "avx512bf16", "sahf")


def target(features: frozenset[str]) -> Target:
    return Target("cpu:some", (), "x86_64", "some", features)


def names(device: str) -> list[str]:
    return [name_of(each.device) for each in resolve_targets(device)]


def listed(device: str) -> str:
    return join_devices(each.device for each in resolve_targets(device))


@pytest.mark.parametrize("device", ["cpu", "cpu:haswell", "hip:gfx942"])
def test_one_device_is_a_list_of_one(device: str) -> None:
    assert resolve_targets(device) == (resolve_target(device),)


def test_each_is_the_target_that_it_is_alone() -> None:
    assert resolve_targets("cpu:haswell,znver4") == (
        resolve_target("cpu:znver4"),
        resolve_target("cpu:haswell"),
    )
    assert resolve_targets("cpu:host") == (resolve_target("cpu"),)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu:x86-64-v3,x86-64-v4", ["x86-64-v4", "x86-64-v3"]),
        ("cpu:haswell, x86-64-v4", ["x86-64-v4", "haswell"]),  # LLVM lists more features of Haswell
        ("cpu:alderlake,skylake-avx512,nehalem", ["skylake-avx512", "alderlake", "nehalem"]),
        ("cpu:bdver3,x86-64-v3", ["x86-64-v3", "bdver3"]),
        ("cpu:znver4,graniterapids,znver5,x86-64", ["graniterapids", "znver5", "znver4", "x86-64"]),
        ("cpu:aarch64,neoverse-v2,neoverse-v1", ["neoverse-v2", "neoverse-v1", "aarch64"]),
    ],
)
def test_the_best_comes_first(device: str, expected: list[str]) -> None:
    assert names(device) == expected
    assert listed(device) == f"cpu:{','.join(expected)}"


def test_gpus_come_before_cpus() -> None:
    assert listed("cpu:nehalem,host,hip:gfx942,gfx1100") == "hip:gfx1100,gfx942,cpu:host,nehalem"
    assert listed("cpu,hip:gfx90a") == "hip:gfx90a,cpu"


def test_two_names_of_a_cpu_give_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `host` on a machine with a CPU that the list also names."""
    made = {name: replace(target(frozenset()), device=name) for name in ("cpu", "cpu:znver4")}
    monkeypatch.setattr(device_list, "resolve_target", made.__getitem__)
    assert resolve_targets("cpu:host,znver4") == (made["cpu"],)


@given(small=st.frozensets(st.sampled_from(X86)), more=st.frozensets(st.sampled_from(X86)))
def test_what_can_use_more_is_preferred(small: frozenset[str], more: frozenset[str]) -> None:
    wide = small | more
    assert preference(target(small)) <= preference(target(wide))
    gains = decisive_features(wide) > decisive_features(small)
    assert (preference(target(small)) < preference(target(wide))) is gains


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cpu:haswell,nosuchcpu", "no CPU 'nosuchcpu'"),
        ("hip:gfx942,gfx943,cpu", "unknown AMD chip 'gfx943': do you mean hip:gfx942"),
        ("gfx942,cpu", "unknown device 'gfx942'"),
        ("vulkan,cpu", "unknown device 'vulkan'"),
    ],
)
def test_an_unknown_name_is_refused(device: str, reason: str) -> None:
    with pytest.raises(BuildError, match=reason):
        resolve_targets(device)


def test_one_architecture_at_a_time() -> None:
    with pytest.raises(
        BuildError, match=r"neoverse-v1 is a CPU of arm_64, and haswell is a CPU of x86_64; .* one for each"
    ):
        resolve_targets("cpu:neoverse-v1,haswell")
