"""The program file, read back by its description in `emulated_gpu/wave/program.h`."""

from __future__ import annotations

import struct

from emulated_gpu.machine_code.code_object import Argument, Descriptor, Kernel
from emulated_gpu.translate.program import (
    Class,
    Encoding,
    KernelProgram,
    Operand,
    OperandKind,
    Record,
    pack,
)

DESCRIPTOR = Descriptor(
    lds_bytes=1,
    scratch_bytes=2,
    kernarg_bytes=3,
    entry_offset=4,
    rsrc3=5,
    rsrc1=6,
    rsrc2=7,
    properties=8,
    preload=9,
)
ARGUMENTS = (
    Argument(0, 8, "global_buffer"),
    Argument(8, 4, "by_value"),
    Argument(16, 4, "hidden_block_count_x"),
    Argument(20, 2, "hidden_remainder_z"),
    Argument(22, 8, "hidden_heap_v1"),
)
KERNEL = Kernel("dispatch$0", DESCRIPTOR, ARGUMENTS, 64, 10, 11, 12, 13, 14, 256, (64, 1, 1), 0x5B700, b"")
FIRST = Record(
    "v_add_f32",
    Class.VECTOR,
    dst=Operand(OperandKind.VGPR, 1, 300),
    sources=[Operand(OperandKind.CONSTANT, 2, 0, 0x3FF0000000000000), Operand(OperandKind.SGPR, 2, 106)],
    address=0x5B700,
    words=2,
    neg=1,
    abs=2,
    neg_hi=3,
    opsel=4,
    opsel_hi=5,
    clamp=1,
    omod=3,
    encoding=Encoding.DPP8,
    lanes_modifier=0xDEADBEEF,
    offset=-5,
    offset1=6,
    target=-1,
    bytes=16,
    sign=1,
    d16=2,
    memory=8,
    cbsz=1,
    abid=2,
    blgp=3,
)
SECOND = Record("s_branch", Class.BRANCH, address=0x5B708, words=1, is_counted=False, target=0)


def test_file() -> None:
    data = pack([KernelProgram(KERNEL, 9, True, [FIRST, SECOND])])
    names = b"\x08s_branch\x09v_add_f32"
    head = b"WAVEPRG1" + struct.pack("<I", 2) + names + struct.pack("<IH", 1, 10) + b"dispatch$0"
    assert data.startswith(head)
    header = struct.unpack_from("<QBBBH6I7H2I", data, len(head))
    assert header == (0x5B700, 64, 9, 1, 5, 3, 1, 2, 6, 7, 5, 8, 9, 10, 11, 12, 13, 14, 256, 2)
    start = len(head) + 59
    arguments = [struct.unpack_from("<HHB", data, start + 5 * number) for number in range(5)]
    assert arguments == [(0, 8, 0), (8, 4, 0), (16, 4, 1), (20, 2, 9), (22, 8, 15)]
    records = data[start + 25 :]
    assert len(records) == 2 * 128
    assert struct.unpack_from("<IHBB", records) == (0x5B700, 1, 2, 1)
    operands = [struct.unpack_from("<BBHQ", records, 8 + 12 * number) for number in range(6)]
    nothing = (0, 1, 0, 0)
    assert operands == [
        (2, 1, 300, 0),
        nothing,
        (3, 2, 0, 0x3FF0000000000000),
        (1, 2, 106, 0),
        nothing,
        nothing,
    ]
    rest = struct.unpack_from("<8BIiii8BI", records, 80)
    assert rest == (1, 2, 3, 4, 5, 1, 3, 2, 0xDEADBEEF, -5, 6, -1, 16, 1, 2, 8, 1, 2, 3, 0, 3)
    assert struct.unpack_from("<IHBB", records, 128) == (0x5B708, 0, 1, 0)
    assert struct.unpack_from("<i", records, 128 + 100) == (0,)
