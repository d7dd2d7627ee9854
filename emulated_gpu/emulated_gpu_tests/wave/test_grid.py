"""Workgroups and waves: what starts defined, barriers, and each planted mistake found with its place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.renderer.amd.dsl import EXEC, EXEC_LO, VCC, VCC_LO, s, ttmp, v

from emulated_gpu.chips import CHIPS, Chip
from emulated_gpu.control import Finding
from emulated_gpu.translate.program import Class
from emulated_gpu_tests.wave.memory_code import CDNA, Code, DeviceMemory, resource
from emulated_gpu_tests.wave.single_grid import GridResult, run_grid
from emulated_gpu_tests.wave.test_global_memory import ON_CHIPS


def emit_addresses(code: Code, shift: int) -> None:
    """v1 = the number of a lane in its workgroup << shift."""
    code.emit("v_lshlrev_b32_e32", v[1], shift, v[0])


def emit_only_wave(code: Code, wave: int) -> None:
    """Keeps in EXEC the lanes of one wave of the workgroup; uses v2 and VCC."""
    code.emit("v_lshrrev_b32_e32", v[2], code.chip.lanes.bit_length() - 1, v[0])
    code.emit("v_cmp_eq_u32_e32", wave, v[2])
    if code.chip.lanes == 64:
        code.emit("s_mov_b64", EXEC, VCC)
    else:
        code.emit("s_mov_b32", EXEC_LO, VCC_LO)


def emit_all_lanes(code: Code) -> None:
    if code.chip.lanes == 64:
        code.emit("s_mov_b64", EXEC, -1)
    else:
        code.emit("s_mov_b32", EXEC_LO, -1)


def emit_resource(code: Code, first: int, memory: DeviceMemory, stride: int = 4) -> None:
    """A buffer over `memory` whose records are of `stride` bytes, in four SGPRs."""
    for number, word in enumerate(
        resource(code.chip, memory.address, memory.array.nbytes // stride, stride=stride, checks=1)
    ):
        code.emit("s_mov_b32", s[first + number], word)


def kinds(result: GridResult) -> list[str]:
    return [finding.kind for finding in result.findings]


def only(result: GridResult, kind: str) -> Finding:
    """The finding, after which there is no other."""
    assert kinds(result) == [kind]
    assert result.findings[0].kernel == "code"
    return result.findings[0]


@ON_CHIPS
@pytest.mark.parametrize("workgroup", [(100, 1, 1), (8, 4, 3), (1, 70, 2)])
def test_lanes_know_their_place(chip: Chip, workgroup: tuple[int, int, int]) -> None:
    size = int(np.prod(workgroup))
    memory = DeviceMemory(np.zeros(size, np.uint32))
    code = Code(chip)
    emit_resource(code, 4, memory)
    code.emit("v_mov_b32_e32", v[3], 0)
    for shift, factor in ((0, 1), (10, workgroup[0]), (20, workgroup[0] * workgroup[1])):
        code.emit("v_lshrrev_b32_e32", v[2], shift, v[0])
        code.emit("v_and_b32_e32", v[2], 1023, v[2])
        code.emit("v_mul_u32_u24_e32", v[2], factor, v[2])
        code.emit(_add(chip), v[3], v[2], v[3])
    code.buffer("store", "b32", 0, 3, 4, idxen=1)
    result = run_grid(chip, code.end(), workgroup=workgroup)
    assert not result.findings
    x, y, z = (memory.array >> shift & 1023 for shift in (0, 10, 20))
    np.testing.assert_array_equal(x + workgroup[0] * (y + workgroup[1] * z), np.arange(size))


def _add(chip: Chip) -> str:
    return "v_add_u32_e32" if chip.generation == 9 else "v_add_nc_u32_e32"


@ON_CHIPS
def test_a_barrier_lets_waves_exchange_through_lds(chip: Chip) -> None:
    size = 3 * chip.lanes
    memory = DeviceMemory(np.zeros(size, np.uint32))
    code = Code(chip)
    emit_resource(code, 4, memory)
    emit_addresses(code, 2)
    code.emit("v_sub_u32_e32" if chip.generation == 9 else "v_sub_nc_u32_e32", v[2], 4 * (size - 1), v[1])
    for _ in range(2):  # waves run in another order the second time
        code.lds_store("b32", 0, 1)
        code.barrier()
        code.lds_load("b32", 3, 2)
        code.barrier()
    code.buffer("store", "b32", 3, 0, 4, idxen=1)
    result = run_grid(chip, code.end(), workgroup=(size, 1, 1), lds_bytes=4 * size)
    assert not result.findings
    np.testing.assert_array_equal(memory.array, np.arange(size)[::-1])


def test_rdna_4_keeps_the_number_of_a_wave_in_a_trap_register() -> None:
    chip = CHIPS["gfx1201"]
    out = DeviceMemory(np.zeros(4 * chip.lanes, np.uint32))
    code = Code(chip)
    code.set_scalar64(4, out.address)
    code.emit("v_lshlrev_b32_e32", v[1], 2, v[0])
    code.emit("s_bfe_u32", s[6], ttmp[8], 5 << 16 | 25)
    code.emit("v_mov_b32_e32", v[2], s[6])
    code.store("global", "b32", 2, 1, base=4)
    assert not run_grid(chip, code.end(), workgroup=(4 * chip.lanes, 1, 1)).findings
    np.testing.assert_array_equal(out.array, np.repeat(np.arange(4), chip.lanes))


@ON_CHIPS
def test_a_load_outside_memory(chip: Chip) -> None:
    memory = DeviceMemory(np.zeros(3 * chip.lanes - 2, np.uint32))
    code = Code(chip)
    code.set_scalar64(4, memory.address)
    emit_addresses(code, 2)
    place = len(code.code)
    code.load("global", "b32", 2, 1, base=4)
    code.wait()
    finding = only(run_grid(chip, code.end(), workgroup=(3 * chip.lanes, 1, 1)), "outside_memory")
    assert (finding.wave, finding.lane, finding.code_address) == (2, chip.lanes - 2, place)
    assert finding.address == memory.address + memory.array.nbytes
    assert finding.instruction == "global_load"


@ON_CHIPS
@pytest.mark.parametrize("first", ["load", "store"])
@pytest.mark.parametrize("second", ["load", "store"])
def test_a_race_between_waves(chip: Chip, first: str, second: str) -> None:
    """Wave 0 and wave 1 touch the same words without a barrier; only two loads may."""
    code = Code(chip)
    emit_addresses(code, 2)
    code.lds_store("b32", 0, 1)
    code.lds_store("b32", 0, 1, offset=8 * chip.lanes)
    code.barrier()
    code.emit("v_and_b32_e32", v[1], 4 * chip.lanes - 4, v[1])  # the same in both waves
    places = []
    for number, action in enumerate((first, second)):
        emit_only_wave(code, number)
        places.append(len(code.code))
        if action == "load":
            code.lds_load("b32", 4 + number, 1, offset=8)
        else:
            code.lds_store("b32", 0, 1, offset=8)
        emit_all_lanes(code)
    code.wait()
    result = run_grid(chip, code.end(), workgroup=(2 * chip.lanes, 1, 1), lds_bytes=16 * chip.lanes + 8)
    if first == second == "load":
        assert not result.findings
        return
    finding = only(result, "lds_race")
    # After an odd number of barriers waves run backwards, so that wave 0 comes second.
    assert (finding.wave, finding.other_wave, finding.lane) == (0, 1, 0)
    assert (finding.address, finding.code_address) == (8, places[0])


@ON_CHIPS
def test_no_race_where_a_barrier_lies_between_or_bytes_differ(chip: Chip) -> None:
    code = Code(chip)
    emit_addresses(code, 1)  # two waves' lanes share a word at most in different halves
    code.emit("v_lshlrev_b32_e32", v[3], 2, v[0])
    code.emit("v_and_b32_e32", v[3], 4 * chip.lanes - 4, v[3])
    code.lds_store("b16", 0, 1)  # the first two waves: bytes of their own
    code.barrier()
    emit_only_wave(code, 0)
    code.lds_store("b32", 0, 3)
    emit_all_lanes(code)
    code.barrier()
    code.lds_load("b32", 4, 3)
    code.wait()
    result = run_grid(chip, code.end(), workgroup=(2 * chip.lanes, 1, 1), lds_bytes=4 * chip.lanes)
    assert not result.findings


@ON_CHIPS
def test_each_byte_of_a_word_may_be_of_another_wave(chip: Chip) -> None:
    code = Code(chip)
    code.emit("v_lshrrev_b32_e32", v[2], chip.lanes.bit_length() - 1, v[0])  # the number of the wave
    code.lds_store("b8", 0, 2)
    code.wait()
    assert not run_grid(chip, code.end(), workgroup=(4 * chip.lanes, 1, 1), lds_bytes=64).findings


@ON_CHIPS
def test_waves_may_all_write_the_same_value(chip: Chip) -> None:
    code = Code(chip)
    emit_addresses(code, 0)
    code.emit("v_and_b32_e32", v[1], 4 * chip.lanes - 4, v[0])
    code.lds_store("b32", 1, 1)
    code.wait()
    assert not run_grid(chip, code.end(), workgroup=(4 * chip.lanes, 1, 1), lds_bytes=512).findings


@ON_CHIPS
def test_waves_may_write_different_bytes_of_a_word_but_not_the_same(chip: Chip) -> None:
    code = Code(chip)
    emit_addresses(code, 0)
    code.emit("v_lshrrev_b32_e32", v[2], 5 if chip.lanes == 32 else 6, v[0])  # the number of the wave
    place = len(code.code)
    code.lds_store("b8", 0, 2)  # byte 0 of word 0 by wave 0, byte 1 by wave 1
    code.lds_store("b8", 0, 2, offset=1)  # byte 1 by wave 0, byte 2 by wave 1
    code.wait()
    result = run_grid(chip, code.end(), workgroup=(2 * chip.lanes, 1, 1), lds_bytes=64)
    finding = only(result, "lds_race")
    assert (finding.wave, finding.other_wave, finding.address) == (1, 0, 1)
    assert finding.code_address == place


@ON_CHIPS
@pytest.mark.parametrize("then", ["atomic", "load", "store"])
def test_atomic_operations_race_with_others_only(chip: Chip, then: str) -> None:
    code = Code(chip)
    code.emit("v_mov_b32_e32", v[1], 0)
    emit_only_wave(code, 0)
    code.lds_store("b32", 1, 1)
    emit_all_lanes(code)
    code.barrier()
    code.emit("ds_add_u32", addr=v[1], data0=v[0])
    if then == "load":
        code.wait()
        code.lds_load("b32", 2, 1)
    elif then == "store":
        code.lds_store("b32", 1, 1)
    else:
        code.emit("ds_add_u32", addr=v[1], data0=v[0])
    code.wait()
    result = run_grid(chip, code.end(), workgroup=(3 * chip.lanes, 1, 1), lds_bytes=64)
    assert set(kinds(result)) == (set() if then == "atomic" else {"lds_race"})


@ON_CHIPS
def test_lds_that_nobody_wrote(chip: Chip) -> None:
    code = Code(chip)
    emit_addresses(code, 2)
    emit_only_wave(code, 1)
    code.lds_store("b32", 0, 1)
    emit_all_lanes(code)
    code.barrier()
    place = len(code.code)
    code.lds_load("b32", 3, 1)
    code.wait()
    result = run_grid(chip, code.end(), workgroup=(2 * chip.lanes, 1, 1), lds_bytes=8 * chip.lanes)
    finding = only(result, "undefined_lds")
    assert (finding.wave, finding.lane, finding.code_address, finding.address) == (0, 0, place, 0)


@ON_CHIPS
def test_lds_is_fresh_in_each_workgroup(chip: Chip) -> None:
    code = Code(chip)
    emit_addresses(code, 2)
    code.lds_load("b32", 3, 1)
    code.wait()
    code.lds_store("b32", 0, 1)
    result = run_grid(chip, code.end(), workgroups=(3, 2, 1), lds_bytes=4 * chip.lanes)
    finding = only(result, "undefined_lds")
    assert finding.repetitions == 5


@ON_CHIPS
def test_a_register_that_nobody_wrote(chip: Chip) -> None:
    memory = DeviceMemory(np.zeros(2 * chip.lanes, np.uint32))
    code = Code(chip)
    code.set_scalar64(4, memory.address)
    emit_addresses(code, 2)
    emit_only_wave(code, 1)
    code.emit(_add(chip), v[4], v[3], v[1])  # v3 was never written
    stored = len(code.code)
    code.store("global", "b32", 4, 1, base=4)
    loaded = len(code.code)
    code.load("global", "b32", 5, 4, base=4)
    code.wait()
    result = run_grid(chip, code.end(), workgroup=(2 * chip.lanes, 1, 1))
    assert [(f.kind, f.wave, f.lane, f.code_address) for f in result.findings] == [
        ("undefined_stored", 1, 0, stored),
        ("undefined_address", 1, 0, loaded),
    ]
    assert result.findings[0].address == memory.address + 4 * chip.lanes


@ON_CHIPS
def test_a_barrier_that_a_wave_does_not_reach(chip: Chip) -> None:
    code = Code(chip)
    emit_only_wave(code, 1)
    skipped = Code(chip)
    skipped.barrier()
    code.emit("s_cbranch_execnz", simm16=len(skipped.code) // 4)
    code.code += skipped.code
    result = run_grid(chip, code.end(), workgroup=(2 * chip.lanes, 1, 1))
    finding = only(result, "divergent_barrier")
    assert finding.wave == 0
    assert finding.code_address == len(code.code) - 8


@ON_CHIPS
def test_waves_at_different_barriers(chip: Chip) -> None:
    code = Code(chip)
    emit_only_wave(code, 1)
    inner = Code(chip)
    inner.barrier()
    inner.emit("s_nop", simm16=0)
    inner.emit("s_endpgm")
    code.emit("s_cbranch_execnz", simm16=len(inner.code) // 4)
    code.code += inner.code
    code.barrier()
    result = run_grid(chip, code.end(), workgroup=(2 * chip.lanes, 1, 1))
    finding = only(result, "divergent_barrier")
    assert {finding.wave, finding.other_wave} == {0, 1}


@ON_CHIPS
def test_a_launch_that_never_ends(chip: Chip) -> None:
    code = Code(chip)
    code.emit("s_nop", simm16=0)
    code.emit("s_branch", simm16=0xFFFE)
    result = run_grid(chip, code.end(), max_instructions=1000)
    assert result.status == 2
    assert only(result, "endless").lane == -1


@ON_CHIPS
def test_an_unknown_instruction_stops_the_launch(chip: Chip) -> None:
    code = Code(chip)
    code.emit("s_nop", simm16=0)
    place = len(code.code)
    code.emit("s_sethalt", simm16=1)
    result = run_grid(chip, code.end(), workgroups=(4, 1, 1))
    assert result.status == 1
    finding = only(result, "unknown_instruction")
    assert finding.code_address == place
    assert "s_sethalt" in finding.instruction


@ON_CHIPS
def test_a_load_that_is_not_waited_for(chip: Chip) -> None:
    memory = DeviceMemory(np.zeros(chip.lanes, np.uint32))
    code = Code(chip)
    code.set_scalar64(4, memory.address)
    emit_addresses(code, 2)
    code.load("global", "b32", 2, 1, base=4)
    place = len(code.code)
    code.emit("v_mov_b32_e32", v[3], v[2])
    code.wait()
    finding = only(run_grid(chip, code.end()), "missing_wait")
    assert (finding.code_address, finding.address) == (place, 2)


@ON_CHIPS
@pytest.mark.parametrize("touches_memory", [False, True])
def test_only_accesses_to_lds_must_have_arrived_at_a_barrier(chip: Chip, touches_memory: bool) -> None:
    """An exchange between lanes goes through the same unit, and its counter, but meets no other wave."""
    code = Code(chip)
    code.emit("v_lshlrev_b32_e32", v[1], 2, v[0])
    if touches_memory:
        code.lds_store("b32", 0, 1)
    else:
        code.emit("ds_bpermute_b32", vdst=v[2], addr=v[1], data0=v[0])
    code.meet()
    code.wait()
    result = run_grid(chip, code.end(), workgroup=(2 * chip.lanes, 1, 1), lds_bytes=512)
    assert set(kinds(result)) == ({"missing_wait"} if touches_memory else set())


# ---- counters
@ON_CHIPS
def test_instructions_are_counted_by_class(chip: Chip) -> None:
    memory, out = (DeviceMemory(np.zeros(2 * chip.lanes, np.uint32)) for _ in range(2))
    code = Code(chip)
    code.set_scalar64(4, memory.address)
    emit_addresses(code, 2)
    for _ in range(3):
        code.load("global", "b32", 2, 1, base=4)
    code.wait()
    code.set_scalar64(4, out.address)
    code.store("global", "b32", 2, 1, base=4)
    result = run_grid(chip, code.end(), workgroups=(2, 1, 1), workgroup=(2 * chip.lanes, 1, 1))
    assert not result.findings
    counted = {
        each: result.instructions[each] // 4 for each in (Class.LOAD, Class.STORE, Class.VECTOR, Class.LDS)
    }
    assert counted == {Class.LOAD: 3, Class.STORE: 1, Class.VECTOR: 1, Class.LDS: 0}
    assert result.counters["loaded_bytes"] == 4 * 2 * chip.lanes * 4 * 3 // 2
    assert result.counters["unique_loaded_bytes"] == result.counters["unique_stored_bytes"] == 8 * chip.lanes


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 300), st.integers(0, 60000)), min_size=64, max_size=64),
    st.sampled_from([1, 4, 8, 16]),
    st.booleans(),
)
def test_bytes_and_lines_of_any_addresses(offsets: list[int], size: int, is_store: bool) -> None:
    memory, table = DeviceMemory(np.zeros(65536, np.uint8)), DeviceMemory(np.array(offsets, np.uint32))
    code = Code(CDNA)
    emit_resource(code, 8, table)
    code.set_scalar64(4, memory.address)
    code.buffer("load", "b32", 1, 0, 8, idxen=1)
    code.wait()
    for register in range(4, 8):
        code.emit("v_mov_b32_e32", v[register], 0)
    if is_store:
        code.store("global", {1: "b8", 4: "b32", 8: "b64", 16: "b128"}[size], 4, 1, base=4)
    else:
        code.load("global", {1: "u8", 4: "b32", 8: "b64", 16: "b128"}[size], 4, 1, base=4)
    code.wait()
    counters = run_grid(CDNA, code.end()).counters
    touched = {memory.address + offset + byte for offset in offsets for byte in range(size)}
    kind = "stored" if is_store else "loaded"
    own = 0 if is_store else 256  # the table is loaded too
    assert counters[f"{kind}_bytes"] == 64 * size + own
    assert counters[f"{kind}_lines"] == len({address // 64 for address in touched}) + own // 64
    assert counters[f"unique_{kind}_bytes"] == len(touched) + own
