"""Modules and launches: code objects are loaded, arguments laid out, kernels run, and mistakes refused."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import pytest

from emulated_gpu.control import Control
from emulated_gpu_tests.code_objects import NUM_SGPRS, RELATIVE64, KernelSource, code_object
from emulated_gpu_tests.hip.api import (
    INVALID_CONFIGURATION,
    INVALID_FUNCTION,
    INVALID_HANDLE,
    INVALID_IMAGE,
    INVALID_VALUE,
    LAUNCH_FAILURE,
    NO_BINARY,
    NOT_FOUND,
    Handle,
    Hip,
    raises,
)

END = 0xBF810000  # s_endpgm of gfx9
ENDLESS = 0xBF82FFFF  # s_branch to itself
# gfx9: each lane stores the second argument to its place in the array that the first argument points to.
STORE = [
    *(0xC0060080, 0),  # s_load_dwordx2 s[2:3], s[0:1], 0
    *(0xC0020100, 8),  # s_load_dword s4, s[0:1], 8
    0xBF8CC07F,  # s_waitcnt lgkmcnt(0)
    0x24000082,  # v_lshlrev_b32 v0, 2, v0
    0x7E020204,  # v_mov_b32 v1, s4
    *(0xDC708000, 0x00020100),  # global_store_dword v0, v1, s[2:3]
    END,
]
POINTER, VALUE = (0, 8, "global_buffer"), (8, 4, "by_value")
STORING = KernelSource("store", STORE, [POINTER, VALUE])
# The value that the same kernel stores if the argument is a hidden one, in a launch of 1 x 3 x 2
# workgroups of 64 lanes with 128 bytes of dynamic LDS.
HIDDEN = {
    "hidden_block_count_x": 1,
    "hidden_block_count_y": 3,
    "hidden_block_count_z": 2,
    "hidden_group_size_x": 64,
    "hidden_group_size_z": 1,
    "hidden_remainder_x": 0,
    "hidden_grid_dims": 3,
    "hidden_dynamic_lds_size": 128,
    "hidden_printf_buffer": 0,
}
HALF_WORDS = ("hidden_group_size_", "hidden_remainder_", "hidden_grid_dims")


class Module:
    """A loaded code object."""

    def __init__(self, hip: Hip, image: bytes) -> None:
        self.hip = hip
        self.handle = hip.make("hipModuleLoadData", image)

    def function(self, name: str) -> Handle:
        return self.hip.make("hipModuleGetFunction", self.handle, name.encode())

    def launch(
        self,
        function: Handle,
        *arguments: int,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (64, 1, 1),
        lds: int = 0,
        stream: Handle | None = None,
    ) -> None:
        values = (ctypes.c_uint64 * max(len(arguments), 1))(*arguments)
        parameters = [ctypes.addressof(values) + 8 * i for i in range(len(arguments))]
        sizes = map(ctypes.c_uint, (*grid, *block, lds))
        self.hip.call(
            "hipModuleLaunchKernel", function, *sizes, stream, (ctypes.c_void_p * 8)(*parameters), None
        )


@pytest.fixture
def load(hip: Hip) -> Callable[[bytes], Module]:
    return lambda image: Module(hip, image)


Load = Callable[[bytes], Module]


def test_a_kernel_gets_its_arguments_and_stores(hip: Hip, load: Load, fresh: Control) -> None:
    module, address = load(code_object("gfx942", [STORING])), hip.malloc(4 * 64)
    module.launch(module.function("store"), address, 0x12345678)
    assert hip.read(address, 256) == struct.pack("<I", 0x12345678) * 64
    counters = fresh.report().kernels["store"]
    assert (counters.launches, counters.stored_bytes) == (1, 256)
    assert fresh.report().findings == ()
    hip.call("hipFree", address)


@pytest.mark.parametrize("asks_for", [*([bit] for bit in NUM_SGPRS), list(NUM_SGPRS)], ids=str)
def test_arguments_and_workgroup_come_after_what_else_a_kernel_asks_for(
    hip: Hip, load: Load, fresh: Control, asks_for: list[int]
) -> None:
    """Each lane stores the number of its workgroup; the registers follow in the order of the bits."""
    pointer = sum(NUM_SGPRS[bit] for bit in asks_for if bit < 3)
    workgroup = KernelSource("", [], asks_for=asks_for).num_user_sgprs
    code = [
        *(0xC0060000 | 20 << 6 | pointer >> 1, 0),  # s_load_dwordx2 s[20:21], s[pointer:pointer + 1], 0
        0x24000082,  # v_lshlrev_b32 v0, 2, v0
        0x7E020200 | workgroup,  # v_mov_b32 v1, s[workgroup]
        0xBF8CC07F,  # s_waitcnt lgkmcnt(0)
        *(0xDC708000, 20 << 16 | 0x0100),  # global_store_dword v0, v1, s[20:21]
        END,
    ]
    module = load(code_object("gfx942", [KernelSource("store", code, [POINTER], asks_for=asks_for)]))
    address = hip.malloc(4 * 64)
    module.launch(module.function("store"), address)
    assert hip.read(address, 256) == bytes(256)


@pytest.mark.parametrize(("scratch_bytes", "found"), [(272, set()), (268, {"outside_scratch"})])
def test_cdna2_has_scratch_through_a_buffer_resource(
    hip: Hip, load: Load, fresh: Control, scratch_bytes: int, found: set[str]
) -> None:
    """Lane n stores n in the word 4 + n of its scratch, and loads it again."""
    fresh.command("chip gfx90a")
    code = [
        *(0x80000700, 0x82018001),  # s_add_u32 s0, s0, s7; s_addc_u32 s1, s1, 0
        0x24020082,  # v_lshlrev_b32 v1, 2, v0
        *(0xE0701010, 0x80000001),  # buffer_store_dword v0, v1, s[0:3], 0 offen offset:16
        0xBF8C0F70,  # s_waitcnt vmcnt(0)
        *(0xE0501010, 0x80000201),  # buffer_load_dword v2, v1, s[0:3], 0 offen offset:16
        *(0xC0060102, 0),  # s_load_dwordx2 s[4:5], s[4:5], 0
        0xBF8C0070,  # s_waitcnt vmcnt(0) lgkmcnt(0)
        *(0xDC708000, 0x00040201),  # global_store_dword v1, v2, s[4:5]
        END,
    ]
    kernel = KernelSource("spill", code, [POINTER], scratch_bytes=scratch_bytes, asks_for=[0])
    module, address = load(code_object("gfx90a", [kernel])), hip.malloc(256)
    module.launch(module.function("spill"), address)
    assert struct.unpack("<63I", hip.read(address, 252)) == tuple(range(63))
    assert {finding.kind for finding in fresh.report().findings} - {"undefined_stored"} == found
    hip.call("hipFree", address)


@pytest.mark.parametrize(("kind", "expected"), list(HIDDEN.items()))
def test_hidden_arguments(hip: Hip, load: Load, kind: str, expected: int) -> None:
    size = 2 if kind.startswith(HALF_WORDS) else 4
    kernel = KernelSource("store", STORE, [POINTER, (8, size, kind), (8 + size, 4 - size, "hidden_none")])
    module, address = load(code_object("gfx942", [kernel])), hip.malloc(256)
    module.launch(module.function("store"), address, grid=(1, 3, 2), lds=128)
    assert struct.unpack("<I", hip.read(address, 4)) == (expected,)
    hip.call("hipFree", address)


def test_a_store_past_an_allocation_is_found_and_dropped(hip: Hip, load: Load, fresh: Control) -> None:
    module, address = load(code_object("gfx942", [STORING])), hip.malloc(4 * 50)
    module.launch(module.function("store"), address, 7)
    assert hip.read(address, 200) == struct.pack("<I", 7) * 50
    (finding,) = fresh.report().findings
    assert (finding.kind, finding.kernel, finding.address) == ("outside_memory", "store", address + 200)
    assert (finding.lane, finding.instruction) == (50, "global_store")
    hip.call("hipFree", address)


def test_a_store_to_freed_memory_is_found(hip: Hip, load: Load, fresh: Control) -> None:
    module, address, stream = load(code_object("gfx942", [STORING])), hip.malloc(256), hip.stream()
    hip.call("hipFree", address)
    module.launch(module.function("store"), address, 7, stream=stream)
    hip.synchronise(stream)
    assert fresh.report().findings[0].kind == "outside_memory"


def test_an_endless_kernel_fails_its_device_until_it_is_revived(hip: Hip, load: Load, fresh: Control) -> None:
    module, stream = load(code_object("gfx942", [KernelSource("spin", [ENDLESS])])), hip.stream()
    fresh.command("max-instructions 1000")
    module.launch(module.function("spin"), stream=stream)
    with raises(LAUNCH_FAILURE):
        hip.synchronise(stream)
    with raises(LAUNCH_FAILURE):
        module.launch(module.function("spin"), stream=stream)
    assert [finding.kind for finding in fresh.report().findings] == ["endless"]
    fresh.command("revive 0")
    fresh.command("max-instructions 500000000")
    hip.synchronise(stream)


def test_a_launch_fails_on_demand(hip: Hip, load: Load, fresh: Control) -> None:
    kernels = [KernelSource("first", [END]), KernelSource("second", [END])]
    module, stream = load(code_object("gfx942", kernels)), hip.stream()
    first, second = module.function("first"), module.function("second")
    fresh.command(f"fail-launch 2 {LAUNCH_FAILURE} second")
    for function in (first, second, first):
        module.launch(function, stream=stream)
    hip.synchronise(stream)
    module.launch(second, stream=stream)
    with raises(LAUNCH_FAILURE):
        hip.synchronise(stream)


def test_launches_that_were_given_run_though_the_module_is_unloaded(
    hip: Hip, load: Load, fresh: Control
) -> None:
    module, address, stream = load(code_object("gfx942", [STORING])), hip.malloc(256), hip.stream()
    function = module.function("store")
    fresh.command("stall 0")
    module.launch(function, address, 9, stream=stream)
    hip.call("hipModuleUnload", module.handle)
    with raises(INVALID_FUNCTION):
        module.launch(function, address, 9, stream=stream)
    fresh.command("resume 0")
    hip.synchronise(stream)
    assert hip.read(address, 4) == struct.pack("<I", 9)
    hip.call("hipFree", address)


@pytest.mark.parametrize("num_passed", [1, 3])
def test_a_wrong_number_of_arguments_is_refused_where_it_shows(hip: Hip, load: Load, num_passed: int) -> None:
    """IREE puts the values right behind the pointers to them."""
    module = load(code_object("gfx942", [STORING]))
    words = (ctypes.c_uint64 * (2 * num_passed))()
    for i in range(num_passed):
        words[i] = ctypes.addressof(words) + 8 * (num_passed + i)
    sizes = map(ctypes.c_uint, (1, 1, 1, 64, 1, 1, 0))
    with raises(INVALID_VALUE):
        hip.call("hipModuleLaunchKernel", module.function("store"), *sizes, None, words, None)


@pytest.mark.parametrize(
    ("grid", "block", "lds"),
    [
        *(((0, 1, 1), (64, 1, 1), 0), ((1, 1, 1), (0, 1, 1), 0), ((1, 1, 1), (1024, 2, 1), 0)),
        *(((1, 1, 1), (257, 1, 1), 0), ((1 << 26, 1, 1), (64, 1, 1), 0), ((1, 1, 1), (64, 1, 1), 1 << 16)),
    ],
)
def test_sizes_that_cannot_be_launched(
    load: Load, grid: tuple[int, int, int], block: tuple[int, int, int], lds: int
) -> None:
    module = load(code_object("gfx942", [KernelSource("small", [END], lds_bytes=16, max_workgroup=256)]))
    with raises(INVALID_CONFIGURATION):
        module.launch(module.function("small"), grid=grid, block=block, lds=lds)


def test_a_function_belongs_to_the_device_it_was_loaded_on(hip: Hip, load: Load) -> None:
    module = load(code_object("gfx942", [KernelSource("nothing", [END])]))
    hip.set_device(1)
    with raises(INVALID_HANDLE):
        module.launch(module.function("nothing"), stream=hip.stream())


def test_attributes_of_a_function(hip: Hip, load: Load) -> None:
    kernel = KernelSource("sized", [END], lds_bytes=4096, scratch_bytes=48, max_workgroup=256)
    function = load(code_object("gfx942", [kernel])).function("sized")
    values = []
    for number in (0, 1, 3, 4, 8):
        value = ctypes.c_int()
        hip.call("hipFuncGetAttribute", ctypes.byref(value), ctypes.c_int(number), function)
        values.append(value.value)
    assert values == [256, 4096, 48, 16, 65536 - 4096]


def test_the_other_chip_s_code_object_is_refused_with_a_reason(hip: Hip, fresh: Control) -> None:
    image, log = (
        code_object("gfx1100", [KernelSource("nothing", [0xBFB00000])]),
        ctypes.create_string_buffer(256),
    )
    options, values = (ctypes.c_int * 2)(5, 6), (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
    with raises(NO_BINARY):
        hip.make("hipModuleLoadDataEx", image, ctypes.c_uint(2), options, values)
    assert b"machine 0x41, the device is gfx942" in log.value
    fresh.command("chip gfx1100")
    module = Module(hip, image)
    module.launch(module.function("nothing"), stream=hip.stream())


def test_what_is_no_code_object_is_refused(hip: Hip) -> None:
    with raises(INVALID_IMAGE):
        hip.make("hipModuleLoadData", b"\x7fELF" + bytes(200))


def test_names_that_are_not_there(hip: Hip, load: Load) -> None:
    module = load(code_object("gfx942", [KernelSource("nothing", [END])]))
    with raises(NOT_FOUND):
        module.function("other")
    with raises(NOT_FOUND):
        hip.call("hipModuleGetGlobal", ctypes.byref(Handle()), None, module.handle, b"nothing.else")


def test_global_variables_have_addresses_and_are_relocated(hip: Hip, load: Load) -> None:
    kernels = [KernelSource("nothing", [END])]
    module = load(code_object("gfx942", kernels, variables={"table": bytes(16)}, relocation=RELATIVE64))
    address, size = Handle(), ctypes.c_size_t()
    hip.call("hipModuleGetGlobal", ctypes.byref(address), ctypes.byref(size), module.handle, b"table")
    assert size.value == 16
    (relocated, rest) = struct.unpack("<QQ", hip.read(address.value or 0, 16))
    assert hip.read(relocated - 16, 4) == b"\x7fELF"  # the image begins with the file's header
    assert rest == 0


def test_an_unknown_relocation_is_refused(hip: Hip) -> None:
    image = code_object("gfx942", [KernelSource("nothing", [END])], variables={"x": bytes(8)}, relocation=99)
    with raises(INVALID_IMAGE):
        Module(hip, image)
