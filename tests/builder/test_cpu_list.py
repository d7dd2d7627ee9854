from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.builder.cpu_list import (
    cpu_name,
    cpu_names,
    listed_device,
    preference,
    resolve_targets,
)
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.host_cpu import decisive_features

X86 = ("avx", "avx2", "fma", "avx512f", "avx512vnni", "amx-tile", "amx-bf16", "avx512bf16", "sahf")


def target(features: frozenset[str]) -> Target:
    return Target("cpu:some", (), "x86_64", "some", features)


def names(device: str) -> list[str]:
    return [cpu_name(each) for each in resolve_targets(device)]


@pytest.mark.parametrize("device", ["cpu", "cpu:haswell", "cpu:host", "hip:gfx942"])
def test_another_device_is_no_list(device: str) -> None:
    assert cpu_names(device) == []
    assert resolve_targets(device) == (resolve_target(device),)


def test_each_is_the_target_that_it_is_alone() -> None:
    assert resolve_targets("cpu:haswell,znver4") == (
        resolve_target("cpu:znver4"),
        resolve_target("cpu:haswell"),
    )
    assert resolve_targets("cpu:host,host") == (resolve_target("cpu"),)


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
    assert listed_device(resolve_targets(device)) == f"cpu:{','.join(expected)}"


def test_each_is_there_once() -> None:
    assert names("cpu:haswell,haswell") == ["haswell"]
    assert listed_device(resolve_targets("cpu:haswell,haswell")) == "cpu:haswell"
    assert listed_device(resolve_targets("cpu:host,host")) == "cpu"


@given(small=st.frozensets(st.sampled_from(X86)), more=st.frozensets(st.sampled_from(X86)))
def test_what_can_use_more_is_preferred(small: frozenset[str], more: frozenset[str]) -> None:
    wide = small | more
    assert preference(target(small)) <= preference(target(wide))
    gains = decisive_features(wide) > decisive_features(small)
    assert (preference(target(small)) < preference(target(wide))) is gains


@pytest.mark.parametrize("device", ["cpu:haswell,", "cpu:,haswell", "cpu:haswell,,znver4", "cpu:,"])
def test_an_empty_name_is_refused(device: str) -> None:
    with pytest.raises(BuildError, match=r"before and after each comma"):
        resolve_targets(device)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(BuildError, match=r"no CPU 'nosuchcpu'"):
        resolve_targets("cpu:haswell,nosuchcpu")


def test_one_architecture_at_a_time() -> None:
    with pytest.raises(
        BuildError, match=r"neoverse-v1 is a CPU of arm_64 and haswell one of x86_64; .* one for each"
    ):
        resolve_targets("cpu:neoverse-v1,haswell")
