"""Compiles small models with random weights and calls their entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import iree.runtime as iree
import ml_dtypes
import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.build.compile import compile_model
from shortfin_apps.llm.build.graph_entry import page_elements
from shortfin_apps.llm.build.graph_weights import parameter_types
from shortfin_apps.llm.build.spec import BuildOptions, LlamaSpec
from shortfin_apps.llm.components.runtime.device import Device, DeviceBuffer, Program

DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
PAGES = 40

Array = npt.NDArray[Any]


def random_weights(spec: LlamaSpec, options: BuildOptions, seed: int = 0) -> dict[str, Array]:
    """Seeded weights in their compiled types, scaled so that activations stay near 1."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, (shape, dtype) in parameter_types(spec, options).items():
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * rng.standard_normal(shape)
        else:
            values = rng.standard_normal(shape) * (1.0 if name == "token_embd.weight" else shape[-1] ** -0.5)
        weights[name] = values.astype(np.float32).astype(DTYPES[dtype])
    return weights


def write_parameters(weights: Mapping[str, Array], path: Path) -> None:
    index = iree.ParameterIndex()
    for name, array in weights.items():
        index.add_buffer(name, np.ascontiguousarray(array).view(np.uint8).reshape(-1))
    index.create_archive_file(str(path))


@dataclass
class CompiledModel:
    """A loaded program over one page table of PAGES pages, and the weights as f32."""

    spec: LlamaSpec
    options: BuildOptions
    weights: dict[str, npt.NDArray[np.float32]]
    device: Device
    program: Program
    cache: DeviceBuffer = field(init=False)

    @classmethod
    def build(cls, spec: LlamaSpec, options: BuildOptions, device: Device, folder: Path) -> CompiledModel:
        weights = random_weights(spec, options)
        write_parameters(weights, folder / "model.irpa")
        compile_model(spec, options, folder / "model.vmfb")
        program = device.load_program(folder / "model.vmfb", [folder / "model.irpa"], "module")
        model = cls(spec, options, {k: w.astype(np.float32) for k, w in weights.items()}, device, program)
        model.fill_cache(0xFF)
        return model

    def fill_cache(self, byte: int) -> None:
        """Overwrites every page; 0xFF makes NaN of every element of every type."""
        shape = (PAGES, page_elements(self.spec, self.options))
        raw = np.full((shape[0], shape[1] * DTYPES[self.options.kv].itemsize), byte, np.uint8)
        self.cache = self.device.upload(raw.view(DTYPES[self.options.kv]))

    def read_cache(self) -> npt.NDArray[np.uint8]:
        return self.device.download(self.cache).view(np.uint8)

    def call(self, entry: str, arguments: Sequence[Array]) -> tuple[Array, Array, Array]:
        """values, indices, logits of the entry."""
        buffers = [self.device.upload(a) for a in arguments]
        results = self.program.submit(entry, [*buffers, self.cache]).wait()
        values, indices, logits = (self.device.download(r) for r in results)
        return values, indices, logits

    def prefill(
        self, entry: str, tokens: Array, starts: Array, seq_lens: Array, blocks: Array
    ) -> tuple[Array, Array, Array]:
        return self.call(entry, [a.astype(np.int64) for a in (tokens, starts, seq_lens, blocks)])

    def decode(self, entry: str, tokens: Array, starts: Array, blocks: Array) -> tuple[Array, Array, Array]:
        return self.call(entry, [a.astype(np.int64) for a in (tokens, starts + 1, starts, blocks)])
