"""A kernel to compile and launch: a Triton function with its operands, sizes, grid and tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from shortfin_apps.llm.builder.kernels.interface import Interface

Constexpr = int | float | bool | str | tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Tuning:
    """Waves per workgroup, and pipeline stages (tiles of loads in flight at once).

    `fuses_products`: a product and a sum may become a fused multiply-add, which rounds once. `max_registers`
    of a lane, on NVIDIA GPUs: a limit for their assembler, which otherwise may take more than help.
    """

    num_waves: int = 4
    num_stages: int = 2
    fuses_products: bool = True
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class Tiles:
    """The number of workgroups along a dimension of the grid: ceil(operand / size) * times, plus any `more`.

    `operand` and `more` name values of the dispatch's workload. `most`: the largest number, if any.
    """

    operand: str
    size: int = 1
    more: str | None = None
    times: int = 1
    most: int | None = None


Grid = Sequence[int | Tiles]  # up to three dimensions, x first


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A function of Triton or Gluon with one set of sizes.

    The function's operands are, in this order, the buffers of the interface (read, written in place,
    results) and the interface's constants. All other parameters are in `constexprs`, and may be at any
    position. `most_shared_bytes`: shared memory that a workgroup may have, so that several run at a time.
    """

    name: str
    function: Any
    interface: Interface
    constexprs: Mapping[str, Constexpr]
    grid: Grid
    tuning: Tuning = Tuning()
    most_shared_bytes: int | None = None

    @property
    def workload(self) -> tuple[str, ...]:
        """Names of the values that determine the grid; a dispatch passes these values as its workload."""
        named = [name for each in self.grid if isinstance(each, Tiles) for name in (each.operand, each.more)]
        return tuple(dict.fromkeys(name for name in named if name is not None))

    def without(self, absent: AbstractSet[str]) -> Kernel:
        """Return the kernel without the buffers `absent`, which are None in the function."""
        if not absent:
            return self
        old = self.interface
        kept = [{n: b for n, b in buffers.items() if n not in absent} for buffers in (old.reads, old.writes)]
        return replace(
            self,
            name="_without_".join([self.name, *sorted(absent)]),
            interface=Interface(old.constants, *kept),
            constexprs={**self.constexprs, **dict.fromkeys(sorted(absent))},
        )
