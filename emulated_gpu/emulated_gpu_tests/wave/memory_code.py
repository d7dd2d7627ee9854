"""Memory instructions of any chip from one spelling, and live memory of the emulated device."""

from __future__ import annotations

import ctypes
import importlib
import weakref
from typing import Any

import numpy as np
from tinygrad.renderer.amd.dsl import EXEC_HI, NULL, s, v

from emulated_gpu.chips import CHIPS, Chip
from emulated_gpu_tests.devices import loaded

_SIGNAL_BARRIER = bytes.fromhex(
    "c14e80be"
)  # s_barrier_signal -1, whose operand tinygrad refuses (LLVM, MC tests)
_MODULES = {9: "cdna", 11: "rdna3", 12: "rdna4"}
_CDNA_LOADS = {
    "u8": "ubyte",
    "i8": "sbyte",
    "u16": "ushort",
    "i16": "sshort",
    "b32": "dword",
    "b64": "dwordx2",
    "b96": "dwordx3",
    "b128": "dwordx4",
    "b256": "dwordx8",
    "d16_u8": "ubyte_d16",
    "d16_hi_u8": "ubyte_d16_hi",
    "d16_i8": "sbyte_d16",
    "d16_hi_i8": "sbyte_d16_hi",
    "d16_b16": "short_d16",
    "d16_hi_b16": "short_d16_hi",
    "b512": "dwordx16",
}
_CDNA_STORES = {
    "b8": "byte",
    "b16": "short",
    "d16_hi_b8": "byte_d16_hi",
    "d16_hi_b16": "short_d16_hi",
    **{kind: _CDNA_LOADS[kind] for kind in ("b32", "b64", "b96", "b128")},
}
_CDNA_ATOMICS = {"min_i": "smin", "max_i": "smax", "min_u": "umin", "max_u": "umax"}
DWORDS = {"b64": 2, "b96": 3, "b128": 4, "b256": 8, "b512": 16}

# Others execute instructions as one of these.
ALL_CHIPS = tuple(CHIPS[name] for name in ("gfx942", "gfx950", "gfx1100", "gfx1201"))
CDNA, GFX950, RDNA3, RDNA4 = ALL_CHIPS


def dwords_of(kind: str) -> int:
    """The registers that a value of `kind`, as in b128 or add_u64, takes."""
    return DWORDS.get(kind, 2 if kind.endswith("64") else 1)


def registers(first: int, dwords: int) -> Any:
    """VGPRs from `first` on."""
    return v[first] if dwords == 1 else v[first : first + dwords - 1]


def scalars(first: int, dwords: int) -> Any:
    """SGPRs from `first` on."""
    return s[first] if dwords == 1 else s[first : first + dwords - 1]


class Code:
    """Machine code for a chip. Kinds are spelt as on RDNA: u8, b128, d16_hi_b16, add_u32."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self.instructions = importlib.import_module(
            f"tinygrad.runtime.autogen.amd.{_MODULES[chip.generation]}.ins"
        )
        self.code = b""

    def emit(self, mnemonic: str, *operands: Any, **fields: Any) -> None:
        """Adds one instruction by its name on this chip."""
        self.code += getattr(self.instructions, mnemonic)(*operands, **fields).to_bytes()

    def end(self) -> bytes:
        """Adds s_endpgm; the whole code."""
        self.emit("s_endpgm")
        return self.code

    def wait(self) -> None:
        """Waits for all loads."""
        if self.chip.generation == 12:
            for name in ("s_wait_loadcnt", "s_wait_dscnt", "s_wait_kmcnt"):
                self.emit(name, simm16=0)
        else:
            self.emit("s_waitcnt", simm16=0)

    def barrier(self) -> None:
        """Waits for LDS, then for the other waves."""
        self.wait()
        self.meet()

    def meet(self) -> None:
        """Waits for the other waves alone."""
        if self.chip.generation == 12:
            self.code += _SIGNAL_BARRIER
            self.emit("s_barrier_wait", simm16=0xFFFF)
        else:
            self.emit("s_barrier")

    def set_scalar64(self, first: int, value: int) -> None:
        """Puts an address into two SGPRs."""
        self.emit("s_mov_b32", s[first], value & 0xFFFFFFFF)
        self.emit("s_mov_b32", s[first + 1], value >> 32)

    # ---- global, flat and scratch
    def load(
        self, space: str, kind: str, dst: int, address: int, base: int | None = None, offset: int = 0
    ) -> None:
        name = _CDNA_LOADS[kind] if self._is_cdna else kind
        self._vector(
            f"{space}_load_{name}", space, {"vdst": registers(dst, dwords_of(kind))}, address, base, offset
        )

    def store(
        self, space: str, kind: str, data: int, address: int, base: int | None = None, offset: int = 0
    ) -> None:
        name = _CDNA_STORES[kind] if self._is_cdna else kind
        fields = {self._data: registers(data, dwords_of(kind))}
        self._vector(f"{space}_store_{name}", space, fields, address, base, offset)

    def atomic(
        self, space: str, kind: str, data: int, address: int, dst: int | None = None, offset: int = 0
    ) -> None:
        dwords = dwords_of(kind)
        fields = {self._data: registers(data, dwords * (2 if "cmpswap" in kind else 1))}
        if dst is not None:
            # tinygrad's tables of RDNA name one register for what a compare-and-swap of 64 bits returns.
            named = 1 if kind == "cmpswap_b64" and not self._is_cdna else dwords
            fields |= {"vdst": registers(dst, named), **self._returning()}
        self._vector(f"{space}_atomic_{self._atomic_name(kind)}", space, fields, address, None, offset)

    def _vector(
        self, name: str, space: str, fields: dict[str, Any], address: int, base: int | None, offset: int
    ) -> None:
        fields["ioffset" if self.chip.generation == 12 else "offset"] = offset & (
            0xFFFFFF if self.chip.generation == 12 else 0x1FFF if space != "flat" else 0xFFF
        )
        # Only the first register is encoded; how many tinygrad wants to be named differs.
        wide = {9: False, 11: base is None, 12: True}[self.chip.generation] and space != "scratch"
        fields["vaddr" if self.chip.generation == 12 else "addr"] = registers(address, 2 if wide else 1)
        if space == "scratch":
            fields["sve"] = 1
        fields["saddr"] = scalars(base, 1 if space == "scratch" else 2) if base is not None else self._no_base
        self.emit(name, **fields)

    # ---- buffers
    def buffer(
        self,
        name: str,
        kind: str,
        data: int,
        address: int,
        resource: int,
        scalar: Any = 0,
        offset: int = 0,
        **flags: int,
    ) -> None:
        """`name`: load, store or atomic; flags: offen, idxen, returns."""
        if name == "atomic":
            kind_name, dwords = self._atomic_name(kind), dwords_of(kind) * (2 if "cmpswap" in kind else 1)
        else:
            names = _CDNA_LOADS if name == "load" else _CDNA_STORES
            kind_name, dwords = names[kind] if self._is_cdna else kind, dwords_of(kind)
        if flags.pop("returns", 0):
            flags |= self._returning()
        num_addresses = max(1, flags.get("offen", 0) + flags.get("idxen", 0))
        fields: dict[str, Any] = {
            "vdata": registers(data, dwords),
            "vaddr": registers(address, num_addresses),
        }
        if self.chip.generation == 12:
            soffset = NULL if scalar == 0 else scalar
            fields |= {"rsrc": resource, "soffset": soffset, "ioffset": offset, "format": 1}
        else:
            fields |= {"srsrc": scalars(resource, 4), "soffset": scalar, "offset": offset}
        self.emit(f"buffer_{name}_{kind_name}", **fields, **flags)

    # ---- LDS
    def lds_load(self, kind: str, dst: int, address: int, offset: int = 0) -> None:
        self._lds("load", "read", kind, {"vdst": registers(dst, dwords_of(kind))}, address, offset)

    def lds_store(self, kind: str, data: int, address: int, offset: int = 0) -> None:
        self._lds("store", "write", kind, {"data0": registers(data, dwords_of(kind))}, address, offset)

    def _lds(
        self, name: str, cdna: str, kind: str, fields: dict[str, Any], address: int, offset: int
    ) -> None:
        half, _, plain = kind.rpartition("_")
        suffix = {"": "", "d16": "_d16", "d16_hi": "_d16_hi"}[half]
        plain = {"b16": "u16"}.get(plain, plain) if name == "load" else plain
        mnemonic = f"ds_{cdna if self._is_cdna else name}_{plain}{suffix}"
        self.emit(mnemonic, **fields, addr=v[address], offset0=offset & 255, offset1=offset >> 8)

    def lds_pair(
        self,
        name: str,
        kind: str,
        registers_of: dict[str, Any],
        address: int,
        offsets: tuple[int, int],
        *,
        strided: bool = False,
    ) -> None:
        """`name`: load or store at two offsets, in elements (or in 64 elements)."""
        if self._is_cdna:
            mnemonic = f"ds_{'read' if name == 'load' else 'write'}2{'st64' if strided else ''}_{kind}"
        else:
            mnemonic = f"ds_{name}_2addr{'_stride64' if strided else ''}_{kind}"
        self.emit(mnemonic, **registers_of, addr=v[address], offset0=offsets[0], offset1=offsets[1])

    # ---- scalar loads
    def scalar_load(
        self,
        kind: str,
        dst: int,
        base: int,
        offset: int = 0,
        register: int | None = None,
        *,
        from_buffer: bool = False,
    ) -> None:
        name = f"s_{'buffer_' if from_buffer else ''}load_{_CDNA_LOADS[kind] if self._is_cdna else kind}"
        fields: dict[str, Any] = {
            "sdata": scalars(dst, dwords_of(kind)),
            "sbase": scalars(base, 4 if from_buffer else 2),
            "ioffset" if self.chip.generation == 12 else "offset": offset
            & (0xFFFFFF if self.chip.generation == 12 else 0x1FFFFF),
        }
        if self._is_cdna:
            fields |= {"imm": 1} | ({"soffset": s[register], "soffset_en": 1} if register is not None else {})
        elif register is not None:
            fields["soffset"] = s[register]
        self.emit(name, **fields)

    # ---- how chips differ
    @property
    def _is_cdna(self) -> bool:
        return self.chip.generation == 9

    @property
    def _data(self) -> str:
        return "vsrc" if self.chip.generation == 12 else "data"

    @property
    def _no_base(self) -> Any:
        return EXEC_HI if self._is_cdna else NULL  # 127 and 124

    def _returning(self) -> dict[str, int]:
        return {9: {"sc0": 1}, 11: {"glc": 1}, 12: {"th": 1}}[self.chip.generation]

    def _atomic_name(self, kind: str) -> str:
        if self.chip.generation == 12:
            return kind.replace("min_f", "min_num_f").replace("max_f", "max_num_f")
        if self.chip.generation == 11 or "_f" in kind or "bf16" in kind:
            return kind
        plain, bits = kind[:-2], kind[-2:]
        plain = _CDNA_ATOMICS.get(plain, plain.rpartition("_")[0])
        return plain + ("_x2" if bits == "64" else "")


class DeviceMemory:
    """A live allocation with the given content, freed with this object. `array` shows it as it is."""

    def __init__(self, content: np.ndarray) -> None:
        library = loaded().library
        pointer = ctypes.c_void_p()
        content = np.ascontiguousarray(content)
        assert library.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(content.nbytes)) == 0
        assert pointer.value
        self.address = pointer.value
        raw = (ctypes.c_uint8 * content.nbytes).from_address(self.address)
        self.array: np.ndarray = np.ctypeslib.as_array(raw).view(content.dtype).reshape(content.shape)
        self.array[...] = content
        self._finalizer = weakref.finalize(self, library.hipFree, ctypes.c_void_p(self.address))


def resource(
    chip: Chip,
    address: int,
    records: int,
    *,
    stride: int = 0,
    swizzle: int = 0,
    index_stride: int = 0,
    checks: int = 3,
    adds_lane: bool = False,
) -> list[int]:
    """The four words of a buffer resource.

    `swizzle`: 0 or 1 on CDNA, 0 to 3 on RDNA; `checks`: RDNA's OOB_SELECT.
    """
    word1 = address >> 32 | stride << 16 | swizzle << (31 if chip.generation == 9 else 30)
    word3 = index_stride << 21 | adds_lane << 23 | (checks << 28 if chip.generation > 9 else 0)
    return [address & 0xFFFFFFFF, word1, records, word3]
