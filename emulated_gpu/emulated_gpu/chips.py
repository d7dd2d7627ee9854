"""The chips that can be emulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from emulated_gpu.machine_code.formats import InstructionSet, is_cdna


@dataclass(frozen=True)
class Chip:
    """The properties of a chip that programs can observe. `number` identifies it in ELF (EF_AMDGPU_MACH)."""

    name: str
    number: int
    instruction_set: InstructionSet
    lanes: int  # per wave, unless a kernel specifies otherwise
    lds_bytes: int = 64 << 10  # maximum per workgroup

    @property
    def generation(self) -> int:
        """GFX architecture: 9 (CDNA), 11 (RDNA 3 and 3.5), 12 (RDNA 4)."""
        return {"cdna2": 9, "cdna": 9, "rdna3": 11, "rdna4": 12}[self.instruction_set]

    @property
    def has_accumulation_registers(self) -> bool:
        return is_cdna(self.instruction_set)

    @property
    def writes_back(self) -> bool:
        """Whether the device sees a store only after an L2 cache was written back, as it has several."""
        return self.instruction_set == "cdna"


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            Chip("gfx90a", 0x3F, "cdna2", 64),
            Chip("gfx942", 0x4C, "cdna", 64),
            Chip("gfx950", 0x4F, "cdna", 64, 160 << 10),
            Chip("gfx1100", 0x41, "rdna3", 32),
            Chip("gfx1101", 0x46, "rdna3", 32),
            Chip("gfx1103", 0x44, "rdna3", 32),
            Chip("gfx1150", 0x43, "rdna3", 32),
            Chip("gfx1151", 0x4A, "rdna3", 32),
            Chip("gfx1200", 0x48, "rdna4", 32),
            Chip("gfx1201", 0x4E, "rdna4", 32),
        )
    }
)
BY_NUMBER: Mapping[int, Chip] = MappingProxyType({chip.number: chip for chip in CHIPS.values()})
