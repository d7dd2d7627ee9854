"""The instructions that kernels become, read from the compiler's assembly for other CPUs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from shortfin_apps.llm.builder.program.compiler import compile_text
from shortfin_apps.llm.builder.program.module import ModelModule
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.model.spec import BuildOptions, WeightType
from tests.builder.compiled_model import TINY
from tests.builder.specs import changed
from tests.kernel_families import note_compiled

pytestmark = pytest.mark.slow

SPEC = changed(TINY, {"head_dim": 32}, layers=1)
SMALL = BuildOptions(prefill_batch_sizes=(1,), decode_batch_sizes=(1,), chunk_sizes=(), top_k=4)
# Of four neighbours along K in a block; of a panel; of activations in blocks, by default.
STEPS, COLUMNS, DIGITS = 8, 32, 2
# The fused layers of SPEC, by how their names begin, and their matmuls.
MATMULS = {"fused_layer_qkv": 1, "fused_layer_x": 3, "decode_fused_layer_x": 3, "fused_layer_logits": 1}


def instructions(device: str, weights: WeightType, folder: Path) -> dict[str, Counter[str]]:
    """How often each function of the model for `device` has each instruction."""
    target = resolve_target(device)
    text = ModelModule(SPEC, replace(SMALL, device=device, weights=weights), target).text()
    flag = f"--iree-hal-dump-executable-intermediates-to={folder}"
    compile_text(text, (*target.flags, flag), folder / "model.vmfb")
    note_compiled(text, target.architecture)
    [assembly] = folder.glob("*.s")
    found: dict[str, Counter[str]] = {}
    function = ""
    for line in assembly.read_text().splitlines():
        if label := re.match(r"(\w+):", line):
            function = label[1]
        elif instruction := re.match(r"\s+(?:\{vex\}\s+)?([a-z]\w+)\s", line):
            found.setdefault(function, Counter())[instruction[1]] += 1
    return found


def per_matmul(found: dict[str, Counter[str]], instruction: str) -> list[float]:
    """How often each fused layer has the instruction, in the mean of its matmuls: they are inlined."""
    return [
        count[instruction] / matmuls
        for layer, matmuls in MATMULS.items()
        for name, count in found.items()
        if name.startswith(layer)
    ]


@pytest.mark.parametrize(("cpu", "weights"), [("neoverse-n1", "q8_0"), ("apple-m1", "q4")])
def test_neon_multiplies_blocks_with_sdot(cpu: str, weights: WeightType, tmp_path: Path) -> None:
    found = instructions(f"cpu:{cpu}", weights, tmp_path)
    # For tiles of two rows and of one, with four columns each.
    assert per_matmul(found, "sdot") == [3 * DIGITS * STEPS * COLUMNS // 4] * len(MATMULS)
    assert not any(per_matmul(found, "smmla"))
    rounding = per_matmul(found, "fcvtns")
    assert len(rounding) == len(MATMULS)
    assert all(rounding)


def test_neon_multiplies_bytes_with_sdot(tmp_path: Path) -> None:
    found = instructions("cpu:apple-m1", "int8", tmp_path)
    # For tiles of two rows and of one; a step of four neighbours along K is an iteration.
    assert per_matmul(found, "sdot") == [3 * COLUMNS // 4] * len(MATMULS)
    assert not any(per_matmul(found, "smmla"))


@pytest.mark.parametrize(
    ("cpu", "weights"), [("neoverse-v1", "q8_0"), ("neoverse-v2", "q4"), ("apple-m2", "q8_0")]
)
def test_neon_multiplies_blocks_of_two_rows_with_smmla(cpu: str, weights: WeightType, tmp_path: Path) -> None:
    found = instructions(f"cpu:{cpu}", weights, tmp_path)
    # Half as many products as by SDOT for tiles of two rows, and as many for one.
    assert per_matmul(found, "smmla") == [DIGITS * STEPS * COLUMNS // 4] * len(MATMULS)
    assert per_matmul(found, "sdot") == [DIGITS * STEPS * COLUMNS // 4] * len(MATMULS)


def test_neon_multiplies_bytes_of_two_rows_with_smmla(tmp_path: Path) -> None:
    found = instructions("cpu:neoverse-v1", "int8", tmp_path)
    # A step of eight neighbours along K is an iteration.
    assert per_matmul(found, "smmla") == [2 * COLUMNS // 4] * len(MATMULS)
    assert per_matmul(found, "sdot") == [2 * COLUMNS // 4] * len(MATMULS)


def test_neon_multiplies_bf16_in_pairs_with_bfdot(tmp_path: Path) -> None:
    found = instructions("cpu:neoverse-v1", "bf16", tmp_path)
    # For tiles of six, four, two and one rows; a pair of neighbours along K is an iteration.
    assert per_matmul(found, "bfdot") == [(6 + 4 + 2 + 1) * COLUMNS // 4] * len(MATMULS)


def test_aarch64_without_bfdot_widens_bf16(tmp_path: Path) -> None:
    found = instructions("cpu:apple-m1", "bf16", tmp_path)
    assert not any(per_matmul(found, "bfdot"))
    assert all(per_matmul(found, "fmla"))


def test_aarch64_without_sdot_keeps_floats(tmp_path: Path) -> None:
    found = instructions("cpu:cortex-a72", "q8_0", tmp_path)
    assert not per_matmul(found, "sdot")
    assert not sum(count["sdot"] for count in found.values())


def test_amx_multiplies_f16_in_tiles(tmp_path: Path) -> None:
    found = instructions("cpu:graniterapids", "f16", tmp_path)
    # Four for two tiles of rows, whole or left over, with prefetches of three kinds; two for one, with two.
    assert per_matmul(found, "tdpfp16ps") == [2 * 3 * 4 + 2 * 2] * len(MATMULS)
    assert not any(count["tdpbf16ps"] for count in found.values())


def test_amx_multiplies_bf16_in_tiles_where_it_has_f16_too(tmp_path: Path) -> None:
    found = instructions("cpu:graniterapids", "bf16", tmp_path)
    assert all(per_matmul(found, "tdpbf16ps"))
    assert not any(count["tdpfp16ps"] for count in found.values())


def test_amx_without_f16_keeps_its_vectors(tmp_path: Path) -> None:
    found = instructions("cpu:sapphirerapids", "f16", tmp_path)
    assert all(per_matmul(found, "vfmadd231ps"))
    assert not any(count["tdpfp16ps"] + count["tdpbf16ps"] for count in found.values())


@pytest.mark.parametrize(
    ("cpu", "instruction"),
    [
        ("znver4", "vpdpbusd"),
        ("alderlake", "vpdpbusd"),
        ("skylake-avx512", "vpmaddubsw"),
        ("haswell", "vpmaddubsw"),
    ],
)
def test_x86_multiplies_blocks_in_pairs_without_vnni(cpu: str, instruction: str, tmp_path: Path) -> None:
    counts = per_matmul(instructions(f"cpu:{cpu}", "q8_0", tmp_path), instruction)
    assert len(counts) == len(MATMULS)
    assert all(counts)
