"""Kernels by themselves: modules that hold some, compiled for this CPU and loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import iree.runtime as iree
import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor, tensor_type
from shortfin_apps.llm.builder.lowering.linalg.bodies import yield_as
from shortfin_apps.llm.builder.quantise import quantise_rows
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.layout import Fp8Rows, Int8Panels, WeightLayout, stored_types
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.contract.host_cpu import permit_amx, this_host
from tests.builder.compiled_model import DTYPES, HOST
from tests.builder.random_blocks import random_blocks
from tests.compiled_programs import compile_program
from tests.kernel_families import note_executed

F32 = npt.NDArray[np.float32]
Inputs = dict[str, tuple[int | str, ...]]
Load = Callable[[str, Path], Any]  # compiles the text of a module in a folder, and has its functions

# 130 rows cross a row block, the others take every kind of tail.
ROWS = [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 130]
# The same CPU without the bf16 dot and wide registers: the tiles that smaller machines get.
NARROW = replace(HOST, features=frozenset({"avx2", "fma"}))
NO_TILES = replace(HOST, features=frozenset(f for f in HOST.features if not f.startswith("amx")))
# Where its layouts alone are read, a CPU of aarch64.
SMMLA = replace(HOST, features=frozenset({"neon", "dotprod", "i8mm"}))
NAMES = {
    NARROW.features: "narrow",
    NO_TILES.features: "no-tiles",
    HOST.features: "host",
    SMMLA.features: "smmla",
}
# Kinds of CPU that this one may be: kernels for any of them run here where it has their features.
AVX2 = frozenset({"avx2", "fma", "f16c"})
CPUS = {
    "amx": HOST,
    "avx512": NO_TILES,
    # As Cascade Lake is.
    "avx512-no-bf16": replace(NO_TILES, features=NO_TILES.features - {"avx512bf16"}),
    # Without the dot product of bytes, as Skylake is.
    "avx512-no-vnni": replace(HOST, features=frozenset({"avx512f", "avx512bw"})),
    "avx-vnni": replace(HOST, features=AVX2 | {"avxvnni"}),
    "avx2": replace(HOST, features=AVX2),
}


def cpu_or_skip(name: str) -> Target:
    """One of CPUS; skips the test where this CPU is none."""
    target = CPUS[name]
    is_own = target.features >= NO_TILES.features - {"avx512bf16"}  # the others name all their features
    missing = {
        "AMX with int8": name == "amx" and not HOST.has_amx_int8,
        "AVX-512": is_own and not HOST.has_wide_vectors,
        "AVX-512 VNNI": is_own and not HOST.has_int8_dot,
        "AVX-512 with bf16": name == "avx512" and not HOST.has_bf16_dot,
        **({} if is_own else dict.fromkeys(this_host().missing(target.features), True)),
    }
    lacks = [feature for feature, is_missing in missing.items() if is_missing]
    if lacks:
        pytest.skip(f"this CPU has no {', '.join(lacks)}")
    return target


class ConstantWeights(WeightTypes):
    """Weights that are constants of the module, and `values`, what they are worth after quantisation."""

    def __init__(self, weights: dict[str, F32], layouts: dict[str, WeightLayout]) -> None:
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        self._layouts = layouts
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self.values: dict[str, F32] = {}
        for name, weight in weights.items():
            arrays, self.values[name] = store_weight(weight, layouts[name])
            self._arrays |= zip(stored_types(layouts[name], name, weight.shape), arrays, strict=True)

    def declarations(self) -> list[str]:
        types = {
            parameter: tensor_type(*kind)
            for name, layout in self._layouts.items()
            for parameter, kind in stored_types(layout, name, self._shapes[name]).items()
        }
        return [
            f'util.global private @"{name}" = dense<"0x{array.tobytes().hex().upper()}"> : {types[name]}'
            for name, array in self._arrays.items()
        ]


def store_weight(weight: F32, layout: WeightLayout) -> tuple[list[npt.NDArray[Any]], F32]:
    """The parameters of a weight, and what it is worth once it is stored."""
    if weight.ndim == 3:
        stored = [store_weight(each, layout) for each in weight]
        arrays = [np.concatenate(arrays) for arrays in zip(*(each for each, _ in stored), strict=True)]
        return arrays, np.stack([worth for _, worth in stored])
    if isinstance(layout, Int8Panels):
        quants, scales = quantise_rows(weight)
        return layout.store(weight), quants * scales[:, None]
    if isinstance(layout, Fp8Rows):
        quants, scales = layout.store(weight)
        return [quants, scales], quants.astype(np.float32) * scales[:, None]
    if layout.blocks is not None:
        blocks = random_blocks(weight, layout.blocks)
        return layout.store(blocks), blocks.dequantise()
    dtype = DTYPES[next(iter(layout.stored("w", weight.shape).values()))[1]]
    return layout.store(weight), weight.astype(dtype).astype(np.float32)


def load(text: str, folder: Path) -> Any:
    """The module `text`, compiled for this CPU and linked in `folder`."""
    vmfb = compile_program(text, HOST)
    (folder / "kernel.vmfb").symlink_to(vmfb)
    permit_amx()
    config = iree.Config("local-sync")
    module = iree.VmModule.copy_buffer(config.vm_instance, vmfb.read_bytes())
    note_executed(text, HOST.architecture)
    return iree.load_vm_module(module, config)


def function(name: str, inputs: dict[str, tuple[int | str, ...]], body: Callable[..., list[Tensor]]) -> str:
    """A function over f32 tensors (a dimension of "?" is dynamic) that returns what `body` emits."""
    e = Emitter()
    tensors = []
    for arg, shape in inputs.items():
        kind = tensor_type(shape, "f32")
        dims = [
            d if isinstance(d, int) else e.value(f"tensor.dim %arg_{arg}, {e.constant(i)} : {kind}")
            for i, d in enumerate(shape)
        ]
        tensors.append(Tensor(f"%arg_{arg}", tuple(dims), "f32"))
    results = body(e, *tensors)
    arguments = ", ".join(f"%arg_{arg}: {tensor_type(shape, 'f32')}" for arg, shape in inputs.items())
    types = ", ".join(t.type for t in results)
    lines = "\n".join(e.lines)
    returned = ", ".join(t.name for t in results)
    return f"func.func @{name}({arguments}) -> ({types}) {{\n{lines}\nreturn {returned} : {types}\n}}"


def narrow(e: Emitter, x: Tensor, dtype: str) -> Tensor:
    return e.elementwise("td", ("td", x.shape, dtype), [(x, "td")], yield_as("%a", dtype))


def widen(e: Emitter, x: Tensor) -> Tensor:
    body = (
        "  linalg.yield %a : f32"
        if x.dtype == "f32"
        else f"  %w = arith.extf %a : {x.dtype} to f32\n  linalg.yield %w : f32"
    )
    return e.elementwise("td", ("td", x.shape, "f32"), [(x, "td")], body)
