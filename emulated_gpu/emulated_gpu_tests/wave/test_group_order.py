"""Order between workgroups: each planted mistake is found, and the same kernel without it has no finding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from tinygrad.renderer.amd.dsl import EXEC, EXEC_LO, NULL, VCC, VCC_LO, s, v

from emulated_gpu.chips import CHIPS, Chip
from emulated_gpu_tests.wave.memory_code import ALL_CHIPS, Code, DeviceMemory
from emulated_gpu_tests.wave.single_grid import GridResult, run_grid

# gfx90a has one L2 cache, which needs no write-back.
ON_CHIPS = pytest.mark.parametrize("chip", [*ALL_CHIPS, CHIPS["gfx90a"]], ids=lambda chip: chip.name)
BUFFER_WBINVL1_VOL = bytes.fromhex("0000fce000000000")  # which tinygrad's tables lack
WORKGROUPS = 5
# Little more than a workgroup's first turn: other workgroups may wait for that long without being stuck.
FEW_INSTRUCTIONS = 110_000
DATA = 4  # two SGPRs


@dataclass(frozen=True)
class Barrier:
    """A grid barrier, and what is left out of it."""

    waits_for_stores: bool = True
    writes_back: bool = True
    waits_for_write_back: bool = True
    invalidates: bool = True
    missing: int = 0  # how many workgroups it does not wait for


def emit_store_wait(code: Code) -> None:
    """Waits for the wave's own stores."""
    if code.chip.generation == 9:
        code.emit("s_waitcnt", simm16=0)
    elif code.chip.generation == 11:
        code.emit("s_waitcnt_vscnt", sdst=NULL, simm16=0)
    else:
        code.emit("s_wait_storecnt", simm16=0)


def emit_invalidate(code: Code) -> None:
    if code.chip.name == "gfx90a":
        code.code += BUFFER_WBINVL1_VOL
    elif code.chip.generation == 9:
        code.emit("buffer_inv", sc1=1)
    elif code.chip.generation == 11:
        code.emit("buffer_gl1_inv")
        code.emit("buffer_gl0_inv")
    else:
        code.emit("global_inv", scope=2)


def emit_barrier(code: Code, barrier: Barrier) -> None:
    """All lanes store the same; v20, v21: address of the counter. Uses v22 to v24, EXEC is restored."""
    is_cdna = code.chip.generation == 9
    if barrier.waits_for_stores:
        emit_store_wait(code)
    if code.chip.writes_back and barrier.writes_back:
        code.emit("buffer_wbl2", sc1=1)
        if barrier.waits_for_write_back:
            emit_store_wait(code)
    if is_cdna:
        code.emit("s_mov_b64", EXEC, 1)
    else:
        code.emit("s_mov_b32", EXEC_LO, 1)
    code.emit("v_mov_b32_e32", v[22], 1)
    code.atomic("global", "add_u32", 22, 20)
    code.emit("v_mov_b32_e32", v[22], 0)
    code.emit("v_mov_b32_e32", v[24], WORKGROUPS - barrier.missing)
    start = len(code.code)
    code.atomic("global", "add_u32", 22, 20, dst=23)
    code.wait()
    code.emit("v_cmp_lt_u32_e32", v[23], v[24])
    distance = (len(code.code) + 4 - start) // 4
    code.emit("s_cbranch_vccnz", simm16=-distance & 0xFFFF)
    if barrier.invalidates:
        emit_invalidate(code)
    code.emit("s_mov_b64" if is_cdna else "s_mov_b32", EXEC if is_cdna else EXEC_LO, -1)


def exchange(
    chip: Chip,
    barrier: Barrier,
    *,
    resident: int = 0,
    max_instructions: int = FEW_INSTRUCTIONS,
    seed: int = 0,
    threads: int = 0,
) -> tuple[GridResult, np.ndarray]:
    """Each workgroup stores its number; after the barrier, it loads the number of its neighbour."""
    data = DeviceMemory(np.zeros((WORKGROUPS, chip.lanes), np.uint32))
    out = DeviceMemory(np.zeros((WORKGROUPS, chip.lanes), np.uint32))
    tickets = DeviceMemory(np.zeros(16, np.uint32))
    code = Code(chip)
    _emit_number(code, tickets)
    code.set_scalar64(DATA, data.address)
    code.emit("v_mul_u32_u24_e32", v[2], v[6], v[5])
    code.emit("v_lshlrev_b32_e32", v[1], 2, v[0])
    add = "v_add_u32_e32" if chip.generation == 9 else "v_add_nc_u32_e32"
    code.emit(add, v[2], v[1], v[2])
    code.store("global", "b32", 5, 2, base=DATA)
    emit_barrier(code, barrier)
    code.emit(add, v[7], 1, v[5])  # the neighbour
    code.emit("v_mov_b32_e32", v[8], WORKGROUPS)
    code.emit("v_cmp_eq_u32_e32", v[7], v[8])
    code.emit("v_cndmask_b32_e64", v[7], v[7], 0, VCC if chip.lanes == 64 else VCC_LO)
    code.emit("v_mul_u32_u24_e32", v[7], v[6], v[7])
    code.emit(add, v[7], v[1], v[7])
    code.load("global", "b32", 9, 7, base=DATA)
    code.wait()
    code.set_scalar64(DATA, out.address)
    code.store("global", "b32", 9, 2, base=DATA)
    result = run_grid(
        chip,
        code.end(),
        workgroups=(WORKGROUPS, 1, 1),
        max_instructions=max_instructions,
        resident=resident,
        seed=seed,
        threads=threads,
    )
    return result, out.array.copy()  # its memory is freed with `out`


def _emit_number(code: Code, tickets: DeviceMemory) -> None:
    """v5 = a number of the workgroup, from a counter; v6 = bytes of a row; v20, v21 = the counter."""
    code.emit("v_mov_b32_e32", v[20], tickets.address & 0xFFFFFFFF)
    code.emit("v_mov_b32_e32", v[21], tickets.address >> 32)
    is_wide = code.chip.lanes == 64
    code.emit("s_mov_b64" if is_wide else "s_mov_b32", EXEC if is_wide else EXEC_LO, 1)
    code.emit("v_mov_b32_e32", v[5], 1)
    code.atomic("global", "add_u32", 5, 20, dst=5, offset=32)
    code.wait()
    # tinygrad's table of CDNA has a VGPR for the destination, whose number is encoded like an SGPR's.
    code.emit("v_readfirstlane_b32_e32", v[12] if code.chip.generation == 9 else s[12], v[5])
    code.emit("s_mov_b64" if is_wide else "s_mov_b32", EXEC if is_wide else EXEC_LO, -1)
    code.emit("v_mov_b32_e32", v[5], s[12])
    code.emit("v_mov_b32_e32", v[6], 4 * code.chip.lanes)


def kinds(result: GridResult) -> set[str]:
    return {finding.kind for finding in result.findings}


@ON_CHIPS
@pytest.mark.parametrize("seed", range(6))
def test_a_grid_barrier_orders_workgroups(chip: Chip, seed: int) -> None:
    result, out = exchange(chip, Barrier(), seed=seed)
    assert result.status == 0
    assert not result.findings
    rows = np.roll(np.arange(WORKGROUPS), -1)
    np.testing.assert_array_equal(out, np.repeat(rows, chip.lanes).reshape(out.shape))


@ON_CHIPS
@pytest.mark.parametrize(
    "barrier",
    [
        Barrier(waits_for_stores=False, writes_back=False),
        Barrier(waits_for_stores=False, waits_for_write_back=False),
        Barrier(invalidates=False),
    ],
)
def test_a_mistake_in_a_grid_barrier_is_found(chip: Chip, barrier: Barrier) -> None:
    result, _ = exchange(chip, barrier)
    assert kinds(result) == {"unordered"}
    for finding in result.findings:
        assert (finding.instruction, finding.other_instruction) == ("global_load", "global_store")
        assert finding.workgroup != finding.other_workgroup


@ON_CHIPS
def test_a_barrier_that_opens_early_shows(chip: Chip) -> None:
    """In some orders: as a finding, or as a neighbour's number that is missing, if its load was too early."""
    expected = np.roll(np.arange(WORKGROUPS), -1)[:, None]
    for seed in range(20):
        result, out = exchange(chip, Barrier(missing=1), seed=seed, threads=1)
        if result.findings or (out != expected).any():
            return
    pytest.fail("no order of workgroups shows the mistake")


@ON_CHIPS
def test_several_l2_caches_must_be_written_back(chip: Chip) -> None:
    result, _ = exchange(chip, Barrier(writes_back=False))
    assert kinds(result) == ({"unordered"} if chip.writes_back else set())


@ON_CHIPS
def test_a_grid_that_the_device_cannot_hold_is_found(chip: Chip) -> None:
    result, _ = exchange(chip, Barrier(), resident=WORKGROUPS - 1)
    assert result.status == 2
    assert kinds(result) == {"not_resident"}


@ON_CHIPS
def test_a_counter_that_nobody_raises_is_endless(chip: Chip) -> None:
    result, _ = exchange(chip, Barrier(missing=-1))
    assert result.status == 2
    assert kinds(result) == {"endless"}
