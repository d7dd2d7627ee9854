"""The chips that can be emulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from emulated_gpu.machine_code.formats import INSTRUCTION_SETS, InstructionSet


@dataclass(frozen=True)
class Chip:
    """The properties of a chip that programs can observe."""

    name: str
    generation: int  # GFX architecture: 9 (CDNA 3 and 4), 11 (RDNA 3), 12 (RDNA 4)
    lanes: int  # per wave, unless a kernel specifies otherwise
    lds_bytes: int  # maximum per workgroup
    has_accumulation_registers: bool

    @property
    def instruction_set(self) -> InstructionSet:
        return INSTRUCTION_SETS[self.name]


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            Chip("gfx942", 9, 64, 64 * 1024, has_accumulation_registers=True),
            Chip("gfx950", 9, 64, 160 * 1024, has_accumulation_registers=True),
            Chip("gfx1100", 11, 32, 64 * 1024, has_accumulation_registers=False),
            Chip("gfx1201", 12, 32, 64 * 1024, has_accumulation_registers=False),
        )
    }
)
