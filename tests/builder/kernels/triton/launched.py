"""Triton kernels by themselves: a program that launches some of them, on an emulated GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor, tensor_type
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.components.runtime.device import Device, DeviceBuffer, Program
from tests.builder.compiled_model import ALL_DTYPES, DTYPES
from tests.compiled_programs import compile_program

Array = npt.NDArray[Any]
Inputs = Mapping[str, tuple[str, tuple[int | str, ...]]]  # dtype and shape, a str being the name of a size
Body = Callable[[Emitter, dict[str, Tensor]], list[Tensor]]


def program_text(inputs: Inputs, body: Body, declarations: Callable[[], Sequence[str]]) -> str:
    """A module `m` whose function `f` takes `inputs` and returns the tensors that `body` makes of them.

    Inputs are consumed: those that `body` writes in place are written where they lie.
    """
    e = Emitter()
    tensors = {name: _import(e, name, dtype, shape) for name, (dtype, shape) in inputs.items()}
    results = body(e, tensors)
    joined = ", ".join(t.name for t in results)
    types = ", ".join(t.type for t in results)
    e.line(f"%ready:{len(results)} = hal.tensor.barrier join({joined} : {types}) => %signal : !hal.fence")
    exported = [
        e.value(f"hal.tensor.export %ready#{i} : {t.sized_type} -> !hal.buffer_view")
        for i, t in enumerate(results)
    ]
    views = ", ".join(["!hal.buffer_view"] * len(results))
    arguments = "".join(f"%{name}: !hal.buffer_view, " for name in inputs)
    ins = ", ".join(f"%input{i}: {_declared(*each)}" for i, each in enumerate(inputs.values()))
    outs = ", ".join(f"%output{i}: {_declared(t.dtype, t.shape)}" for i, t in enumerate(results))
    function = (
        f"util.func public @f$async({arguments}%wait: !hal.fence, %signal: !hal.fence) -> ({views}) "
        "attributes {inlining_policy = #util.inline.never, "
        'iree.abi.model = "coarse-fences", iree.abi.stub, iree.reflection = '
        f'{{iree.abi.declaration = "async func @f({ins}) -> ({outs})"}}}} {{\n'
    )
    lines = "\n".join([*e.lines, f"util.return {', '.join(exported)} : {views}", "}"])
    return "\n".join(["module @m {", *declarations(), function + lines, "}\n"])


class Launched:
    """The program `text` on a device, for which it is compiled."""

    def __init__(self, device: Device, target: Target, text: str, inputs: Inputs) -> None:
        vmfb = compile_program(text, target)
        self._device = device
        self._inputs = inputs
        self._program: Program = device.load_program(vmfb, [], "m")

    def __call__(self, **arrays: Array) -> list[Array]:
        """The results; bf16 is widened to f32. Arguments are converted to the inputs' types."""
        results = self._program.submit("f", self.upload(**arrays)).wait()
        return [self.download(result) for result in results]

    def upload(self, **arrays: Array) -> list[DeviceBuffer]:
        types = {name: ALL_DTYPES[dtype] for name, (dtype, _) in self._inputs.items()}
        return [self._device.upload(arrays[name].astype(types[name])) for name in self._inputs]

    def download(self, buffer: DeviceBuffer) -> Array:
        array = self._device.download(buffer)
        return array.astype(np.float32) if array.dtype == DTYPES["bf16"] else array


def rounded(array: Array, dtype: str) -> npt.NDArray[np.float32]:
    """`array` as `dtype` holds it."""
    return array.astype(DTYPES[dtype]).astype(np.float32)


def _import(e: Emitter, name: str, dtype: str, shape: Sequence[int | str]) -> Tensor:
    dims: list[Dim] = [
        size
        if isinstance(size, int)
        else e.value(f"hal.buffer_view.dim<%{name} : !hal.buffer_view>[{axis}] : index")
        for axis, size in enumerate(shape)
    ]
    result = Tensor(e.fresh(), tuple(dims), dtype)
    e.line(
        f'{result.name} = hal.tensor.import wait(%wait) => consume %{name} "{name}" : '
        f"!hal.buffer_view -> {result.sized_type}"
    )
    return result


def _declared(dtype: str, shape: Sequence[Dim]) -> str:
    return tensor_type([size if isinstance(size, int) else "?" for size in shape], dtype)
