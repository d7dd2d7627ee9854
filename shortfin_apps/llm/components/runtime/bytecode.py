"""Reads, from IREE's VM bytecode, which runtime functions are called by the functions of a VMFB.

Source of the encoding: IREE 3.9, `compiler/src/iree/compiler/Dialect/VM/IR/VMOpcodesCore.td` (opcodes) and
`runtime/src/iree/vm/bytecode/utils/isa.h` (fields).
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shortfin_apps.llm.components.runtime.vmfb import check_file, load_error

_MAJOR_VERSION = 15
_DUMP_MODULE = "iree._runtime.scripts.iree_dump_module"

_IMPORT = 1 << 31  # this bit of a callee's number is set for imported functions

_CALL, _CALL_VARIADIC, _RETURN = 0x58, 0x59, 0x5A
_LOAD_REFERENCE = 0x08  # global.load.ref
_MOVED = 0x4000  # this bit of a register number is set where its reference is read for the last time

# Opcodes that occur in functions without branches, by the fields that follow the opcode. `r`: a register that
# is read or holds a reference. `w`, `W`: a register that an i32 or an i64 is written to. `4`, `8`: an
# immediate of 4 or 8 bytes. `v`: a list of registers.
_OPCODES: Mapping[str, Sequence[int]] = {
    "": (0x79,),  # block
    "4w": (0x00, 0x0D),  # global.load, const
    "4W": (0x04,),
    "4r": (0x01, 0x05, 0x11),  # global.store, const.ref.rodata
    "44r": (0x08, 0x09),  # global.load.ref, global.store.ref
    "4rr": (0x12,),  # list.alloc
    "4vv": (_CALL,),  # call
    "4vvv": (_CALL_VARIADIC,),  # call.variadic
    "8W": (0x0F,),  # const
    "v": (_RETURN,),
    "w": (0x0C,),  # const.zero
    "W": (0x0E,),
    "r": (0x10,),
    "rw": (0x02, 0x14, 0x32, *range(0x40, 0x47), 0x4D, 0x52, 0x55, 0x75, 0x77),  # of one operand
    "rW": (0x06, 0x36, 0x47, 0x48, 0x6E, 0x76, 0x78),
    "rr": (0x03, 0x07, 0x13, 0x15),
    "r4r": (0x0A, 0x0B),
    "rr4r": (0x1A,),
    # Arithmetic and comparisons of two operands, loads from buffers, minimum and maximum.
    "rrw": (
        *(0x16, *range(0x22, 0x29), *range(0x33, 0x36), *range(0x3A, 0x3D), *range(0x49, 0x4D)),
        *(*range(0x4E, 0x52), 0x53, 0x54, *range(0x62, 0x67), *range(0x7A, 0x7E)),
    ),
    "rrW": (*(0x18, *range(0x2A, 0x31), *range(0x37, 0x3A), *range(0x3D, 0x40), 0x67, *range(0x7E, 0x82)),),
    "rrr": (0x17, 0x19, 0x1B, *range(0x68, 0x6C)),  # stores to lists and buffers
    "rrrw": (0x1C, 0x29),  # select, fma
    "rrrW": (0x1D, 0x31),
    "r4rrr": (0x1E,),
    "rrvw": (0x1F,),  # switch
    "rrvW": (0x20,),
    "rrvr": (0x21,),
}
_FIELDS = {opcode: fields for fields, opcodes in _OPCODES.items() for opcode in opcodes}
_FORMATS = {"r": "<H", "w": "<H", "W": "<H", "4": "<I", "8": "<Q"}

# Number of registers that a result takes, by its letter in _OPCODES or in an import's calling convention.
_WIDTHS = {"w": 1, "W": 2, "i": 1, "I": 2}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a runtime function.

    `arguments` has the value of each argument that is an i32 constant; `global_numbers` has the number of the
    global that an argument's reference was loaded from. The entries of other arguments are None. Each member
    of a variadic argument is an argument.
    """

    function: str
    arguments: tuple[int | None, ...]
    global_numbers: tuple[int | None, ...]


Calls = Sequence[Call]
_Field = int | tuple[int, ...]
_Operation = tuple[int, list[_Field]]  # an opcode and its fields


def read_calls(path: Path) -> Mapping[str, Calls | None]:
    """Return the calls of each exported function, in order, by the function's name.

    The value is None where the calls would be incomplete: for a function that branches or calls another
    function of the module, and for unknown opcodes or bytecode versions. Raises ArtifactError if the VMFB is
    damaged.
    """
    check_file(path)
    command = [sys.executable, "-m", _DUMP_MODULE, "--output=flatbuffer-json", str(path)]
    run = subprocess.run(command, capture_output=True, check=False)
    if run.returncode:
        raise load_error(path, RuntimeError(run.stderr.decode(errors="replace")))
    module = json.loads(run.stdout)
    code = bytes(module["bytecode_data"])
    return {
        export["local_name"]: _calls(module, code, module["function_descriptors"][_ordinal(export)])
        for export in module["exported_functions"]
    }


def _ordinal(export: Mapping[str, Any]) -> int:
    return int(export.get("internal_ordinal", 0))  # the dump omits zeros


def _calls(module: Mapping[str, Any], code: bytes, function: Mapping[str, Any]) -> Calls | None:
    if module["bytecode_version"] >> 16 != _MAJOR_VERSION or function["block_count"] != 1:
        return None
    start = function.get("bytecode_offset", 0)
    operations = _decode(code[start : start + function["bytecode_length"]])
    if operations is None or any(map(_is_internal_call, operations)):
        return None
    return tuple(_run(operations, module["imported_functions"]))


def _is_internal_call(operation: _Operation) -> bool:
    opcode, fields = operation
    return opcode in (_CALL, _CALL_VARIADIC) and isinstance(fields[0], int) and not fields[0] & _IMPORT


def _decode(code: bytes) -> list[_Operation] | None:
    """Return the operations; None if an opcode is unknown or `code` does not end with a return."""
    position, operations = 0, []
    while position < len(code):
        opcode = code[position]
        position += 1
        if opcode not in _FIELDS:
            return None
        fields: list[_Field] = []
        for kind in _FIELDS[opcode]:
            field, position = _field(code, position, kind)
            fields.append(field)
        operations.append((opcode, fields))
    ends_well = position == len(code) and bool(operations) and operations[-1][0] == _RETURN
    return operations if ends_well else None


def _field(code: bytes, position: int, kind: str) -> tuple[_Field, int]:
    """Return the field at `position` and the position after that field."""
    if kind != "v":
        layout = _FORMATS[kind]
        return struct.unpack_from(layout, code, position)[0], position + struct.calcsize(layout)
    position += position & 1  # lists are aligned
    (count,) = struct.unpack_from("<H", code, position)
    return struct.unpack_from(f"<{count}H", code, position + 2), position + 2 + 2 * count


def _run(operations: list[_Operation], imports: Sequence[Mapping[str, Any]]) -> Iterator[Call]:
    """Yield the calls of a function without branches, tracking constants through its registers."""
    constants: dict[int, int] = {}
    origins: dict[int, int] = {}  # number of the global, by register of the reference
    for opcode, fields in operations:
        match opcode, fields:
            case (_, [int(number), int(), int(register)]) if opcode == _LOAD_REFERENCE:
                origins[register] = number
            case (0x0D, [int(value), int(register)]):
                constants[register] = value
            case (0x0C, [int(register)]):
                constants[register] = 0
            case (0x58 | 0x59, [int(callee), *_, tuple(arguments), tuple(results)]):
                called = imports[callee & ~_IMPORT]
                yield Call(
                    called["full_name"],
                    tuple(map(constants.get, arguments)),
                    tuple(origins.get(register & ~_MOVED) for register in arguments),
                )
                for register in results:
                    origins.pop(register, None)
                _forget(constants, results, _result_types(called, len(results)))
            case _:
                _forget(constants, fields, _FIELDS[opcode])


def _result_types(imported: Mapping[str, Any], count: int) -> str:
    """Return a letter per result from the import's calling convention; `I` for all if counts differ."""
    types = str(imported["signature"]["calling_convention"]).partition("_")[2]
    return types if len(types) == count else "I" * count


def _forget(constants: dict[int, int], registers: Sequence[_Field], types: str) -> None:
    """Remove the constants of the registers that are written to; an i64 takes two registers."""
    for register, kind in zip(registers, types, strict=True):
        if isinstance(register, int) and kind in _WIDTHS:
            for each in range(register, register + _WIDTHS[kind]):
                constants.pop(each, None)
