"""Emission of MLIR: tensors with names and types, fresh SSA names, and the operations of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Dim = int | str  # a str is the SSA name of an index value


class Bounded(str):
    """The SSA name of an index value that is at most `most`.

    A dimension of this size is allocated for `most` elements, so the tensor's type is static. Elements after
    the actual size are undefined.
    """

    most: int

    def __new__(cls, name: str, most: int) -> Bounded:
        bounded = super().__new__(cls, name)
        bounded.most = most
        return bounded


@dataclass(frozen=True, slots=True)
class Tensor:
    """An SSA value of tensor type."""

    name: str
    shape: tuple[Dim, ...]
    dtype: str  # MLIR's name: f32, bf16, i64, ...

    @property
    def type(self) -> str:
        return tensor_type(self.shape, self.dtype)

    @property
    def sizes(self) -> str:
        """The dynamic sizes in the syntax of flow and hal operations: `{%a, %b}`, or an empty string."""
        names = _dynamic(self.shape)
        return "{" + ", ".join(names) + "}" if names else ""

    @property
    def sized_type(self) -> str:
        return self.type + self.sizes


def tensor_type(shape: Sequence[Dim], dtype: str) -> str:
    dims = ["?" if isinstance(dim, str) else str(dim) for dim in map(room, shape)]
    return f"tensor<{'x'.join([*dims, dtype])}>"


def room(dim: Dim) -> Dim:
    """Return the dimension to allocate for `dim` elements."""
    return dim.most if isinstance(dim, Bounded) else dim


def _dynamic(shape: Sequence[Dim]) -> list[str]:
    return [dim for dim in map(room, shape) if isinstance(dim, str)]


def dense(array: npt.NDArray[np.float32]) -> str:
    """Return an MLIR dense attribute with the exact bits of `array`."""
    return f'dense<"0x{array.astype("<f4").tobytes().hex().upper()}"> : {tensor_type(array.shape, "f32")}'


class Emitter:
    """The body of one function under construction."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names = 0
        self._constants: dict[int, str] = {}
        self._loads: dict[str, Tensor] = {}

    def fresh(self) -> str:
        self._names += 1
        return f"%v{self._names}"

    def line(self, text: str) -> None:
        self.lines.append(text)

    def value(self, operation: str) -> str:
        """Emit an operation with one result and return the result's name."""
        name = self.fresh()
        self.line(f"{name} = {operation}")
        return name

    def tensor(self, operation: str, shape: Sequence[Dim], dtype: str) -> Tensor:
        return Tensor(self.value(operation), tuple(shape), dtype)

    def constant(self, number: int) -> str:
        """Return the SSA name of an index constant; each constant is emitted once per function."""
        if number not in self._constants:
            self._constants[number] = self.value(f"arith.constant {number} : index")
        return self._constants[number]

    def index(self, dim: Dim) -> str:
        return self.constant(dim) if isinstance(dim, int) else dim

    def i32(self, dim: Dim) -> str:
        """Emit a cast of `dim` to i32, the type of a dispatch's constants."""
        return self.value(f"arith.index_cast {self.index(dim)} : index to i32")

    def times(self, a: Dim, b: Dim) -> Dim:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        return self.value(f"arith.muli {self.index(a)}, {self.index(b)} : index")

    def ceil_divide(self, a: Dim, b: int) -> Dim:
        if isinstance(a, int):
            return -(-a // b)
        return self.value(f"arith.ceildivui {a}, {self.constant(b)} : index")

    def at_most(self, a: Dim, b: int) -> Dim:
        if isinstance(a, int):
            return min(a, b)
        return self.value(f"arith.minui {a}, {self.constant(b)} : index")

    def load(self, name: str, shape: Sequence[Dim], dtype: str) -> Tensor:
        """Return the tensor of the global `name`, which is loaded once per function."""
        if name not in self._loads:
            kind = tensor_type(shape, dtype)
            self._loads[name] = self.tensor(f'util.global.load @"{name}" : {kind}', shape, dtype)
        return self._loads[name]

    def reshape(self, source: Tensor, shape: Sequence[Dim]) -> Tensor:
        result = Tensor(self.fresh(), tuple(shape), source.dtype)
        self.line(
            f"{result.name} = flow.tensor.reshape {source.name} : {source.sized_type} -> {result.sized_type}"
        )
        return result

    def columns(self, source: Tensor, first: int, count: int) -> Tensor:
        """Return `count` columns of a matrix, starting at `first`."""
        return self.part(source, 1, first, count)

    def part(self, source: Tensor, axis: int, first: int, count: int) -> Tensor:
        """Return `count` elements along an axis, starting at `first`."""
        if count == source.shape[axis]:
            return source
        shape = (*source.shape[:axis], count, *source.shape[axis + 1 :])
        offsets = ", ".join(str(first if each == axis else 0) for each in range(len(shape)))
        sizes, strides = ", ".join(str(room(each)) for each in shape), ", ".join("1" for _ in shape)
        return self.tensor(
            f"tensor.extract_slice {source.name}[{offsets}] [{sizes}] [{strides}] : "
            f"{source.type} to {tensor_type(shape, source.dtype)}",
            shape,
            source.dtype,
        )

    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """Join tensors of one type along an axis, of which they have known sizes."""
        first = parts[0]
        count = 0
        for part in parts:
            size = part.shape[axis]
            assert isinstance(size, int)
            count += size
        shape = (*first.shape[:axis], count, *first.shape[axis + 1 :])
        names, types = ", ".join(part.name for part in parts), ", ".join(part.type for part in parts)
        joined = f"tensor.concat dim({axis}) {names} : ({types}) -> {tensor_type(shape, first.dtype)}"
        return self.tensor(joined, shape, first.dtype)

    def empty(self, shape: Sequence[Dim], dtype: str) -> Tensor:
        return self.tensor(
            f"tensor.empty({', '.join(_dynamic(shape))}) : {tensor_type(shape, dtype)}", shape, dtype
        )

    def fill(self, number: str, shape: Sequence[Dim], dtype: str) -> Tensor:
        scalar = self.value(f"arith.constant {number} : {dtype}")
        out = self.empty(shape, dtype)
        return self.tensor(
            f"linalg.fill ins({scalar} : {dtype}) outs({out.name} : {out.type}) -> {out.type}", shape, dtype
        )

    def elementwise(
        self,
        loops: str,
        out: tuple[str, Sequence[Dim], str],
        ins: Sequence[tuple[Tensor, str]],
        body: str,
        initial: Tensor | None = None,
    ) -> Tensor:
        """Emit a `linalg.generic`, with loops and accesses named by letters as in einsum ("mnk", "mk").

        `ins` are (tensor, access), `out` is (access, shape, dtype). Loops that are missing in the access of
        `out` are reductions, which start from `initial`. `body` is the MLIR of the region: it names the
        elements of the inputs %a, %b, ... and the element of the output %out, may read loop indices with
        `linalg.index`, and must end with `linalg.yield`.
        """
        access, shape, dtype = out
        target = initial or self.empty(shape, dtype)
        maps = ", ".join(affine_map(loops, at) for at in [*(at for _, at in ins), access])
        kinds = ", ".join('"parallel"' if loop in access else '"reduction"' for loop in loops)
        operands = ", ".join(t.name for t, _ in ins)
        types = ", ".join(t.type for t, _ in ins)
        arguments = [f"%{chr(ord('a') + i)}: {t.dtype}" for i, (t, _) in enumerate(ins)]
        inputs = f"ins({operands} : {types}) " if ins else ""
        return self.tensor(
            f"linalg.generic {{indexing_maps = [{maps}], iterator_types = [{kinds}]}} {inputs}"
            f"outs({target.name} : {target.type}) {{\n"
            f"^bb0({', '.join([*arguments, f'%out: {dtype}'])}):\n{body}\n}} -> {target.type}",
            shape,
            dtype,
        )

    def dispatch(
        self,
        kernel: str,
        workload: Sequence[Dim],
        constants: Sequence[Dim],
        reads: Sequence[Tensor],
        results: Sequence[Tensor | tuple[Sequence[Dim], str]],
    ) -> list[Tensor]:
        """Emit a dispatch of `@kernel::@kernel` and return its results.

        An item of `results` is the (shape, dtype) of a new tensor, or a tensor that the kernel writes in
        place.
        """
        numbers = [self.i32(c) for c in constants]
        tied = [r for r in results if isinstance(r, Tensor)]
        operands = [*reads, *tied]
        made = [
            Tensor(self.fresh(), r.shape if isinstance(r, Tensor) else tuple(r[0]), _dtype_of(r))
            for r in results
        ]
        types = [
            f"{r.name}{r.sizes}" if isinstance(r, Tensor) else new.sized_type
            for r, new in zip(results, made, strict=True)
        ]
        self.line(
            f"{', '.join(t.name for t in made)} = flow.dispatch @{kernel}::@{kernel}"
            f"[{', '.join(self.index(w) for w in workload)}]"
            f"({', '.join([*numbers, *(t.name for t in operands)])}) : "
            f"({', '.join(['i32'] * len(numbers) + [t.sized_type for t in operands])}) -> "
            f"({', '.join(types)})"
        )
        return made


def _dtype_of(result: Tensor | tuple[Sequence[Dim], str]) -> str:
    return result.dtype if isinstance(result, Tensor) else result[1]


def affine_map(loops: str, access: str) -> str:
    return f"affine_map<({', '.join(loops)}) -> ({', '.join(access)})>"
