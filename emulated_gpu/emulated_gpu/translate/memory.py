"""Translates memory instructions to records.

Sources of a record: 0 is the vector address or offset, 1 the scalar address or buffer resource, 2 the stored
data, 3 a buffer's scalar offset. For LDS instructions, 0 is the address, 1 and 2 are the data. The data of a
compare-and-swap is the new value, then the compared value, on all chips.
"""

from __future__ import annotations

from collections.abc import Mapping

from emulated_gpu.machine_code.decode import Shape
from emulated_gpu.translate.accesses import Access, Atomic, access_of, atomic_of, lds_access_of, lds_atomic_of
from emulated_gpu.translate.operands import Machine, dwords_of, scalar, source, vgpr
from emulated_gpu.translate.program import NOTHING, Class, MemoryFlag, Operand, Record

_CACHES = ("s_dcache_", "s_gl1_inv", "s_prefetch_", "s_atc_probe", "global_wb")
# Which caches an instruction invalidates: 1 for caches that compute units share, 2 for a compute unit's own.
_INVALIDATED = {
    "buffer_inv": 3,
    "buffer_wbinvl1": 3,
    "buffer_wbinvl1_vol": 3,
    "buffer_gl1_inv": 1,
    "buffer_gl0_inv": 2,
    "global_inv": 3,
    "global_wbinv": 3,
}
_WITHOUT_SCOPE = ("buffer_gl", "buffer_wbinvl1")
_DEVICE_SCOPE = 2  # RDNA 4: of the device; 0 is of a compute unit, 1 of a shader engine, 3 of the system
_CLOCKS = ("s_memtime", "s_memrealtime")
_NO_SCALAR_ADDRESS = {"cdna2": 127, "cdna": 127, "rdna3": 124, "rdna4": 124}
_OFFSET_BITS = {
    "cdna2": {"FLAT": (12, False), "GLOBAL": (13, True)},
    "cdna": {"FLAT": (12, False), "GLOBAL": (13, True), "SCRATCH": (13, True)},
    "rdna3": {"FLAT": (12, False), "GLOBAL": (13, True), "SCRATCH": (13, True)},
    "rdna4": {"FLAT": (24, True), "GLOBAL": (24, True), "SCRATCH": (24, True)},
}
_LANE_EXCHANGES = ("ds_swizzle_b32", "ds_permute_b32", "ds_bpermute_b32", "ds_bpermute_fi_b32")
_TRANSPOSING = {"ds_read_b64_tr_b16", "ds_read_b64_tr_b8", "ds_read_b64_tr_b4", "ds_read_b96_tr_b6"}


def memory(shape: Shape, machine: Machine) -> Record:
    """Translate an instruction of a memory format.

    No cache is emulated. Cache operations on which order between workgroups depends are translated, others
    become s_nop.
    """
    if shape.mnemonic == "buffer_wbl2" and _is_for_device(shape):
        return Record("cache_write_back", Class.STORE)
    has_no_scope = shape.mnemonic.startswith(_WITHOUT_SCOPE)
    if shape.mnemonic in _INVALIDATED and (has_no_scope or _is_for_device(shape)):
        return Record("cache_invalidate", Class.WAIT, offset=_INVALIDATED[shape.mnemonic])
    if shape.mnemonic.startswith((*_CACHES, *_INVALIDATED, "buffer_wbl2")):
        return Record("s_nop", Class.WAIT)
    match shape.format:
        case "SMEM":
            return _scalar_load(shape, machine)
        case "DS":
            return _lds(shape)
        case "MUBUF" | "VBUFFER":
            return _buffer(shape, machine)
        case _:
            return _vector(shape, machine)


def _unknown(shape: Shape) -> Record:
    return Record(f"unknown:{shape.mnemonic}", Class.OTHER)


def _signed(value: int, bits: int) -> int:
    return value - (value >> bits - 1 << bits)


# ---- scalar loads


def _scalar_load(shape: Shape, machine: Machine) -> Record:
    fields = shape.fields
    if shape.mnemonic in _CLOCKS:
        return Record(shape.mnemonic, Class.SCALAR_MEMORY, scalar(fields["sdata"], 2, machine))
    access = access_of(shape.mnemonic)
    if access is None or not access.is_load:
        return _unknown(shape)
    offset_register, offset = _scalar_offset(fields, machine)
    base_dwords = dwords_of(shape.operands["sbase"], machine)
    return Record(
        access.operation,
        Class.SCALAR_MEMORY,
        dst=scalar(fields["sdata"], access.dwords, machine),
        sources=[scalar(2 * fields["sbase"], base_dwords, machine), offset_register],
        offset=offset,
        bytes=access.bytes,
        sign=access.sign,
    )


def _scalar_offset(fields: Mapping[str, int], machine: Machine) -> tuple[Operand, int]:
    """Return the register and the constant byte offset that are both added to a scalar load's base."""
    if machine.is_cdna:
        register = scalar(fields["soffset"], 1, machine) if fields["soffset_en"] else NOTHING
        if not fields["imm"] and not fields["soffset_en"]:
            return scalar(fields["offset"] & 0x7F, 1, machine), 0
        return register, _signed(fields["offset"], 21) if fields["imm"] else 0
    bits, name = (24, "ioffset") if machine.instruction_set == "rdna4" else (21, "offset")
    return scalar(fields["soffset"], 1, machine), _signed(fields[name], bits)


# ---- global memory and scratch


def _vector(shape: Shape, machine: Machine) -> Record:
    access, atomic = access_of(shape.mnemonic), atomic_of(shape.mnemonic)
    kind = shape.format.removeprefix("V")
    if access is not None:
        record = _access_record(access, shape)
    elif atomic is not None:
        record = _atomic_record(atomic, shape)
    else:
        return _unknown(shape)
    record.sources[:2] = _addresses(kind, shape, machine)
    record.offset = _offset(kind, shape, machine)
    return record


def _addresses(kind: str, shape: Shape, machine: Machine) -> list[Operand]:
    fields = shape.fields
    register = fields["vaddr" if "vaddr" in fields else "addr"]
    has_scalar = fields["saddr"] != _NO_SCALAR_ADDRESS[machine.instruction_set]
    if kind == "SCRATCH":
        return [
            vgpr(register) if fields["sve"] else NOTHING,
            scalar(fields["saddr"], 1, machine) if has_scalar else NOTHING,
        ]
    if kind == "FLAT" or not has_scalar:
        return [vgpr(register, 2), NOTHING]
    return [vgpr(register), scalar(fields["saddr"], 2, machine)]


def _offset(kind: str, shape: Shape, machine: Machine) -> int:
    bits, is_signed = _OFFSET_BITS[machine.instruction_set][kind]
    value = shape.fields["ioffset" if "ioffset" in shape.fields else "offset"] & (1 << bits) - 1
    return _signed(value, bits) if is_signed else value


def _access_record(access: Access, shape: Shape) -> Record:
    """Return the record of a load or store, without addresses (sources 0 and 1)."""
    record = Record(access.operation, _class_of(access), sources=[NOTHING, NOTHING, NOTHING])
    record.bytes, record.sign, record.d16 = access.bytes, access.sign, access.d16
    record.memory = MemoryFlag.FOR_DEVICE if _is_for_device(shape) else 0
    if access.operation.endswith("_lds"):
        record.memory |= MemoryFlag.TO_LDS
    elif access.is_load:
        record.dst = _data(shape, ("vdst", "vdata"), access.dwords)
    else:
        record.sources[2] = _data(shape, ("data", "vsrc", "vdata"), access.dwords)
    return record


def _atomic_record(atomic: Atomic, shape: Shape) -> Record:
    """Return the record of an atomic operation, without addresses (sources 0 and 1)."""
    dwords = atomic.bytes // 4
    stored = dwords * (2 if "cmpswap" in atomic.operation else 1)
    record = Record(atomic.operation, Class.ATOMIC, bytes=atomic.bytes)
    record.sources = [NOTHING, NOTHING, _data(shape, ("data", "vsrc", "vdata"), stored)]
    if _returns(shape):
        record.memory = MemoryFlag.RETURNS
        record.dst = _data(shape, ("vdst", "vdata"), dwords)
    return record


def _returns(shape: Shape) -> bool:
    fields = shape.fields
    return bool(fields.get("sc0", 0) or fields.get("glc", 0) or fields.get("th", 0) & 1)


def _is_for_device(shape: Shape) -> bool:
    """Whether all compute units see an access. CDNA 2 and RDNA 3 have a bit for this on loads alone."""
    fields = shape.fields
    if "scope" in fields:
        return fields["scope"] >= _DEVICE_SCOPE
    return bool(fields.get("sc1", 0) or (fields.get("glc", 0) and "_load_" in shape.mnemonic))


def _data(shape: Shape, names: tuple[str, ...], dwords: int) -> Operand:
    name = next(each for each in names if each in shape.fields)
    return vgpr(shape.fields[name], dwords, bool(shape.fields.get("acc")))


def _class_of(access: Access) -> Class:
    if access.operation.startswith("scratch"):
        return Class.SCRATCH
    return Class.LOAD if access.is_load else Class.STORE


# ---- buffers


def _buffer(shape: Shape, machine: Machine) -> Record:
    access, atomic = access_of(_lds_spelling(shape)), atomic_of(shape.mnemonic)
    if access is not None:
        record = _access_record(access, shape)
    elif atomic is not None:
        record = _atomic_record(atomic, shape)
    else:
        return _unknown(shape)
    fields = shape.fields
    num_addresses = fields["offen"] + fields["idxen"]
    record.sources[0] = vgpr(fields["vaddr"], num_addresses) if num_addresses else NOTHING
    record.sources[1] = scalar(fields["rsrc"] if "rsrc" in fields else 4 * fields["srsrc"], 4, machine)
    record.sources.append(source(fields["soffset"], None, machine))
    record.offset = _signed(fields["ioffset"], 24) if "ioffset" in fields else fields["offset"]
    record.memory |= fields["offen"] * MemoryFlag.OFFEN | fields["idxen"] * MemoryFlag.IDXEN
    record.memory |= fields.get("tfe", 0) * MemoryFlag.TFE
    return record


def _lds_spelling(shape: Shape) -> str:
    """Return the mnemonic with `_lds_` for a buffer load to LDS, which CDNA marks only by a bit."""
    return shape.mnemonic.replace("_load_", "_load_lds_") if shape.fields.get("lds") else shape.mnemonic


# ---- LDS


def _lds(shape: Shape) -> Record:
    fields, mnemonic = shape.fields, shape.mnemonic
    if mnemonic == "ds_nop":
        return Record("s_nop", Class.WAIT)
    if fields.get("gds"):
        return _unknown(shape)
    access, atomic = lds_access_of(mnemonic), lds_atomic_of(mnemonic)
    if access is not None:
        return _lds_access(access, shape)
    if atomic is not None:
        return _lds_atomic(atomic, shape)
    if mnemonic in _LANE_EXCHANGES:
        data = [_data(shape, ("data0",), 1)] if "permute" in mnemonic else []  # a swizzle's data is `addr`
        return _lds_record(mnemonic, shape, _data(shape, ("vdst",), 1), data)
    if mnemonic in _TRANSPOSING:
        dwords = 3 if "b96" in mnemonic else 2
        record = _lds_record(
            mnemonic.replace("read", "load"), shape, dst=_data(shape, ("vdst",), dwords), data=[]
        )
        record.bytes = 4 * dwords
        return record
    return _unknown(shape)


def _lds_record(name: str, shape: Shape, dst: Operand, data: list[Operand]) -> Record:
    """Return the record of an LDS instruction, with `bytes` 0, as lane exchanges do not access LDS."""
    return Record(
        name,
        Class.LDS,
        dst=dst,
        sources=[vgpr(shape.fields["addr"]), *data],
        offset=shape.fields["offset0"] | shape.fields["offset1"] << 8,
    )


def _lds_access(access: Access, shape: Shape) -> Record:
    num_addresses = 2 if access.step else 1
    if access.is_load:
        record = _lds_record(
            access.operation, shape, _data(shape, ("vdst",), num_addresses * access.dwords), []
        )
    else:
        data = [_data(shape, (name,), access.dwords) for name in ("data0", "data1")[:num_addresses]]
        record = _lds_record(access.operation, shape, NOTHING, data)
    record.bytes, record.sign, record.d16 = access.bytes, access.sign, access.d16
    if access.step:
        record.offset = shape.fields["offset0"] * access.step
        record.offset1 = shape.fields["offset1"] * access.step
    return record


def _lds_atomic(atomic: Atomic, shape: Shape) -> Record:
    dwords = atomic.bytes // 4
    has_two = "cmpswap" in atomic.operation or "mskor" in atomic.operation
    data = [_data(shape, (name,), dwords) for name in ("data0", "data1")[: 1 + has_two]]
    if shape.mnemonic.startswith("ds_cmpst_"):  # CDNA's data0 is the compared value
        data.reverse()
    record = _lds_record(atomic.operation, shape, NOTHING, data)
    record.bytes = atomic.bytes
    if atomic.returns:
        record.memory = MemoryFlag.RETURNS
        record.dst = _data(shape, ("vdst",), dwords)
    return record
