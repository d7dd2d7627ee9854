"""Small models with self-tests, compiled for this CPU, or another device, and what tests change of them."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shortfin_apps.llm.builder.program.module import ModelModule
from shortfin_apps.llm.builder.self_test.make import make_self_test
from shortfin_apps.llm.builder.sources.random_tiny import SPEC, RandomTinySource
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.builder.weights.parameters import parameter_types
from shortfin_apps.llm.builder.weights.write import write_weights
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.page_table import make_page_cache, make_runner
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.runtime.device import Array, Device, DeviceBuffer, Program
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.components.self_test.locate import Locator
from shortfin_apps.llm.components.self_test.self_test import SelfTest
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.self_test_file import SelfTestFile
from shortfin_apps.llm.model.config import model_config
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec
from tests.compiled_programs import compile_program

# An entry of each kind that CPUs have, some with more than one row.
OPTIONS = BuildOptions(
    prefill_batch_sizes=(1, 2),
    decode_batch_sizes=(1, 4),
    chunk_sizes=(32,),
    extend_sizes=(64,),
    decode_loop_sizes=(4,),
    context_length=128,
    top_k=8,
)
NUM_PAGES = 32


@dataclass(frozen=True)
class Built:
    """The files of a model, and its self-test."""

    spec: ModelSpec
    options: BuildOptions
    config: ModelConfig
    vmfb: Path
    parameters: Path
    file: SelfTestFile

    def flip(self, name: str, element_bytes: int, index: int, bit: int) -> None:
        """Flips a bit of an element of a parameter, in the file and in what maps it."""
        offset = self.offset(name) + index * element_bytes
        with self.parameters.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
            content[offset + bit // 8] ^= 1 << bit % 8

    def offset(self, name: str) -> int:
        """Where a parameter begins in the file."""
        content = self.parameters.read_bytes()
        names = list(parameter_types(self.spec, self.options, resolve_target(self.options.device)))
        fields = struct.unpack_from("<4sHHQQQQ6Q", content)
        table, storage = fields[7], fields[11]
        entry_bytes = -(-struct.calcsize("<QIQ4QQ2Q") // 16) * 16
        entry = struct.unpack_from("<QIQ4QQ2Q", content, table + names.index(name) * entry_bytes)
        return int(storage + entry[8])


@dataclass(frozen=True)
class Opened:
    """A model on a device, with pages."""

    built: Built
    device: Device
    program: Program
    runner: BatchRunner
    cache: KVCache

    @property
    def self_test(self) -> SelfTest:
        return SelfTest(self.runner, self.cache, self.built.file)

    def locator(self, *, same_bits: bool = True) -> Locator:
        return Locator(self.device, self.program, self.built.config, self.built.file, same_bits)


def build_model(
    folder: Path,
    spec: ModelSpec = SPEC,
    options: BuildOptions = OPTIONS,
    compiled_spec: ModelSpec | None = None,
) -> Built:
    """A model of random weights; its program is of `compiled_spec`, if that is another."""
    target = resolve_target(options.device)
    source = RandomTinySource(spec)
    parameters = folder / "model.irpa"
    write_weights(source, options, target, parameters, lambda count: None)
    return Built(
        spec=spec,
        options=options,
        config=model_config(spec, options),
        vmfb=compile_program(module_text(compiled_spec or spec, options, target), target),
        parameters=parameters,
        file=make_self_test(source, options, target, lambda count: None),
    )


def module_text(spec: ModelSpec, options: BuildOptions, target: Target) -> str:
    return ModelModule(spec, options, target).text()


@contextmanager
def opened(built: Built, num_pages: int = NUM_PAGES, device: Device | None = None) -> Iterator[Opened]:
    """The model on this CPU, or on `device`, with a cache that shares prefixes."""
    device = device or open_device("cpu")
    try:
        program = device.load_program(built.vmfb, [built.parameters], built.config.module_name)
        num_window_pages = 0 if built.config.window_tokens is None else num_pages
        runner = make_runner(device, program, built.config, num_pages, num_window_pages)
        cache = make_page_cache(built.config, "trie", num_pages, num_window_pages)
        yield Opened(built, device, program, runner, cache)
    finally:
        device.close()


def with_vmfb(built: Built, vmfb: Path) -> Built:
    return replace(built, vmfb=vmfb)


class Miscomputing:
    """A device whose downloads of logits have a wrong element while it `is_wrong`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.is_wrong = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._device, name)

    def download(self, buffer: DeviceBuffer) -> Array:
        array = self._device.download(buffer)
        if self.is_wrong and array.dtype == np.float32 and array.shape[-1] == SPEC.vocab_size:
            array = array.copy()
            array[0, 0, 7] += 5
        return array
