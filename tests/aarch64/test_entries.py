"""Models for aarch64 under qemu-user: every entry against numpy, and matmuls of blocks against this CPU's.

`make aarch64` runs them, as they take minutes and need qemu-user and Debian's packages for arm64.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.builder.program.compiler import compile_text
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.model.spec import ActivationBits, BuildOptions, WeightType
from shortfin_apps.llm.model.weight_blocks import Q4_1, Q8_0, BlockType
from tests.aarch64.emulated_cpu import ROOT, EmulatedCpu, EmulatedFunctions
from tests.builder.agreement import Tokens, expect, expect_extend, pages_for, prefill_row
from tests.builder.compiled_kernels import NO_TILES, Load, cpu_or_skip
from tests.builder.compiled_model import TINY, CompiledModel, block_table
from tests.builder.lowering.cpu.test_int8 import Kernels as Int8Kernels
from tests.builder.lowering.cpu.test_int8 import random_inputs
from tests.builder.lowering.fused.test_block_types import BITS, Kernels
from tests.builder.random_blocks import GROUPED
from tests.kernel_families import note_executed

pytestmark = [pytest.mark.by_hand, pytest.mark.timeout(1800)]

FOLDER = ROOT / ".aarch64"
# LLVM's names of CPUs, and qemu's of such that have their instructions. The first has SMMLA, the last has not
# even SDOT.
CPUS = {"neoverse-v1": "max", "apple-m1": "max", "neoverse-n1": "neoverse-n1", "cortex-a72": "cortex-a72"}
LENGTHS = (41, 19)


@pytest.fixture(scope="module", params=CPUS)
def cpu(request: pytest.FixtureRequest) -> Iterator[tuple[str, EmulatedCpu]]:
    """LLVM's name of a CPU, and an emulated one."""
    emulated = EmulatedCpu(FOLDER, CPUS[request.param])
    yield request.param, emulated
    emulated.close()


def expect_decode(model: CompiledModel, entry: str, sequences: list[Tokens], tables: Tokens) -> None:
    """The entry computes the last token of each sequence again, in one batch."""
    tokens = np.array([sequence[-1:] for sequence in sequences])
    result = model.decode(entry, tokens, np.array([len(each) - 1 for each in sequences]), tables)
    for logits, sequence in zip(result.logits, sequences, strict=True):
        expect(model, logits, sequence)


def expect_prefill(model: CompiledModel, entry: str, sequences: list[Tokens], tables: Tokens) -> None:
    """The entry computes sequences of several lengths, in one batch."""
    padded = np.zeros((len(sequences), pages_for(max(map(len, sequences))) * 16), np.int64)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    lengths = np.array([len(each) for each in sequences])
    result = model.prefill(entry, padded, np.zeros_like(lengths), lengths, tables)
    for logits, sequence in zip(result.logits, sequences, strict=True):
        expect(model, logits, sequence)


@pytest.mark.parametrize("weights", ["f32", "bf16", "q8_0", "q4", "int8"])
def test_every_entry_agrees_with_numpy(
    cpu: tuple[str, EmulatedCpu], weights: WeightType, tmp_path: Path
) -> None:
    name, device = cpu
    if weights == "int8" and not resolve_target(f"cpu:{name}").has_neon_dot:
        pytest.skip(f"{name} has no SDOT")
    options = BuildOptions(
        device=f"cpu:{name}",
        weights=weights,
        kv="f32" if weights == "f32" else "bf16",
        prefill_batch_sizes=(1, 2),
        decode_batch_sizes=(1, 2),
        chunk_sizes=(32,),
        top_k=8,
    )
    model = CompiledModel.build(TINY, options, device, tmp_path, resolve_target(options.device))
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, TINY.vocab_size, length) for length in LENGTHS]
    tables = block_table(rng, [4, 4], 4)
    expect_prefill(model, "prefill_bs2", sequences, tables)
    expect_decode(model, "decode_bs2", sequences, tables)
    for entry, chunk in {"prefill_bs1": 16, "prefill_bs1_s32": 32}.items():
        result = prefill_row(model, sequences[1][:chunk], tables[1:], chunk, entry)
        expect(model, result.logits[0], sequences[1][:chunk])
    expect_decode(model, "decode_bs1", sequences[:1], tables[:1])
    expect_extend(model, sequences[0], 16, tables)
    called = {"prefill_bs2", "decode_bs2", "prefill_bs1", "prefill_bs1_s32", "decode_bs1", "extend"}
    assert called == {entry for entry in model.program.entries if not entry.startswith("prefill_bs2_s")}


def target_and_load(name: str, device: EmulatedCpu) -> tuple[Target, Load]:
    """For kernels by themselves. Skips what has no SDOT, or cannot be compared with VNNI on this CPU."""
    cpu_or_skip("avx512")
    target = resolve_target(f"cpu:{name}")
    if not target.has_neon_dot:
        pytest.skip(f"{name} has no SDOT")

    def load(text: str, folder: Path) -> Any:
        compile_text(text, target.flags, folder / "kernels.vmfb")
        note_executed(text, target.architecture)
        return EmulatedFunctions(device, folder / "kernels.vmfb")

    return target, load


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", [Q8_0, Q4_1, GROUPED[0], GROUPED[2]], ids=str)
def test_matmuls_of_blocks_have_the_bits_of_vnni(
    cpu: tuple[str, EmulatedCpu], kind: BlockType, bits: ActivationBits, tmp_path: Path
) -> None:
    target, load = target_and_load(*cpu)
    found = Kernels.build(kind, target, "silu", bits, tmp_path, load)
    expected = Kernels.build(kind, NO_TILES, "silu", bits, tmp_path)
    inputs = expected.inputs(17)
    wanted = expected.run(inputs, 17)["plain"]
    for rows in (17, 1, 2, 3):  # SMMLA takes two at a time, and SDOT one that is left over
        np.testing.assert_array_equal(found.run(inputs, rows)["plain"], wanted[:rows], err_msg=f"{rows} rows")


def test_matmuls_in_bytes_have_the_bits_of_vnni(cpu: tuple[str, EmulatedCpu], tmp_path: Path) -> None:
    """Where rows are not normed: LLVM adds a vector's lanes in another order on aarch64."""
    target, load = target_and_load(*cpu)
    inputs = random_inputs(17)
    found = Int8Kernels.build(target, tmp_path, load).outputs(inputs, 17)
    expected = Int8Kernels.build(NO_TILES, tmp_path).outputs(inputs, 17)
    for name in ("down", "output"):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
