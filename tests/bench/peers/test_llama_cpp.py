from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers.cache import SetUpError
from bench.peers.llama_cpp import instructions, repair_amx


def test_the_configuration_is_written_before_it_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "mmq.cpp"
    file.write_text(
        "    tc.rows[7] = 16;\n\n    _tile_loadconfig(&tc);\n    done = true;\n", encoding="utf-8"
    )
    repair_amx(file)
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    assert lines[2:] == [
        '__asm__ volatile("" : : "r"(&tc) : "memory");',
        "_tile_loadconfig(&tc);",
        "done = true;",
    ]


def test_an_unexpected_source_is_not_patched(tmp_path: Path) -> None:
    file = tmp_path / "mmq.cpp"
    file.write_text("nothing of the kind", encoding="utf-8")
    with pytest.raises(SetUpError, match="not as expected"):
        repair_amx(file)
    assert file.read_text(encoding="utf-8") == "nothing of the kind"


def test_instructions_are_those_of_the_device() -> None:
    assert instructions("cpu") == ("-DGGML_NATIVE=ON",)
    haswell = instructions("cpu:haswell")
    assert "-DGGML_NATIVE=OFF" in haswell
    assert "-DGGML_AVX2=ON" in haswell
    assert not any("AVX512" in option for option in haswell)
    assert set(haswell) < set(instructions("cpu:znver4"))


def test_a_device_with_unknown_instructions_is_named() -> None:
    with pytest.raises(SetUpError, match="'cpu:i486' are not known; choose from cpu, cpu:haswell"):
        instructions("cpu:i486")
