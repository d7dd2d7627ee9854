from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from shortfin_apps.llm.artifact.program_record import (
    ProgramRecord,
    TargetRecord,
    choose_program,
    reasons_against,
)
from shortfin_apps.llm.contract.host_cpu import HostCpu

FEATURES = ("avx", "avx2", "fma", "avx512f", "avx512bw", "gfni", "sahf", "cx16")
IGNORED = {"sahf", "cx16"}


@pytest.mark.parametrize(
    ("architecture", "features", "expected"),
    [
        ("x86_64", ("avx2", "avx512bf16"), True),
        ("x86_64", ("avx512bf16", "amx-bf16"), False),
        ("arm_64", ("neon",), False),
        ("gfx942", (), False),
    ],
)
def test_entries_agree_to_the_bit_where_that_was_measured(
    architecture: str, features: tuple[str, ...], expected: bool
) -> None:
    target = TargetRecord(device="cpu", architecture=architecture, cpu="some", features=features)
    assert target.gives_same_bits == expected


def program(cpu: str, features: Sequence[str], device: str | None = None) -> ProgramRecord:
    return ProgramRecord(
        vmfb=f"model.{cpu}.vmfb",
        parameters="model.irpa",
        config="config.json",
        entries=(),
        target=TargetRecord(
            device=device or f"cpu:{cpu}", architecture="x86_64", cpu=cpu, features=tuple(features)
        ),
        compile_flags=(),
        kernels=(),
    )


def host(*features: str) -> HostCpu:
    return HostCpu("x86_64", frozenset({"fpu", *features}))


sets = st.frozensets(st.sampled_from(FEATURES))


@given(needed=st.lists(sets, min_size=1, max_size=5), has=sets)
def test_the_first_that_runs_is_chosen(needed: list[frozenset[str]], has: frozenset[str]) -> None:
    programs = [program(f"c{index}", sorted(each)) for index, each in enumerate(needed)]
    runs = [index for index, each in enumerate(needed) if each - IGNORED <= has]
    chosen = choose_program(programs, host(*has))
    assert chosen is (programs[runs[0]] if runs else None)
    reasons = reasons_against(programs, chosen, host(*has))
    assert len(reasons) == len(programs) - (chosen is not None)
    assert sum("needs" in reason for reason in reasons) == len(programs) - len(runs)


def test_reasons_name_what_is_missing() -> None:
    programs = [
        program("znver9", ["avx2", "avx512f", "gfni"]),
        program("haswell", ["avx2"]),
        program("nehalem", [], "cpu"),
    ]
    cpu = host("avx2")
    chosen = choose_program(programs, cpu)
    assert chosen is programs[1]
    assert reasons_against(programs, chosen, cpu) == [
        "znver9 needs avx512f, gfni",
        "host (nehalem) uses less of it",
    ]


def test_a_host_that_does_not_say_takes_what_needs_least() -> None:
    programs, unknown = [program("znver9", ["avx512f"]), program("nehalem", [])], HostCpu(None, frozenset())
    chosen = choose_program(programs, unknown)
    assert chosen is programs[1]
    (reason,) = reasons_against(programs, chosen, unknown)
    assert reason == "znver9 may need more, and this host does not tell its features"


@pytest.mark.parametrize(
    "name", ["../model.vmfb", "/model.vmfb", "model.a/b.vmfb", "notes.txt", "model.vmfb\n", "", "model.exe"]
)
def test_a_file_outside_the_artefact_is_no_program(name: str) -> None:
    adapter = TypeAdapter(ProgramRecord)
    raw = adapter.dump_python(program("haswell", []))
    assert adapter.validate_python(raw) == program("haswell", [])
    for field in ("vmfb", "parameters"):
        with pytest.raises(ValidationError):
            adapter.validate_python({**raw, field: name})
