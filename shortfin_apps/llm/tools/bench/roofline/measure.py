"""Measures cases and machine limits in turns, so that each case has limits measured right after it.

Two probes measure the limits. They are compiled for the artefact's target and run on its device:

stream [rows, 16384] i32   reads every byte once: sums each row
matmul [1024, 1024] f32    an RMS norm and a projection to q, k and v of 1024 features each, lowered like the
                           model's own layers
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.choose import choose, make_lowering
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, Values
from shortfin_apps.llm.builder.program.compiler import compile_text
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.layout import StoredTypes
from shortfin_apps.llm.builder.weights.parameters import WeightTypes, parameter_types
from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.runtime.declaration import MLIR_DTYPES
from shortfin_apps.llm.components.runtime.device import Device, DeviceBuffer, Program
from shortfin_apps.llm.contract.irpa import ArchiveEntry, write_archive
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.feed_forward import MLP
from shortfin_apps.llm.model.operations import Linear, Norm
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec
from shortfin_apps.llm.tools.bench.roofline.cases import Case, Work

STREAM_COLUMNS = 16384
STREAM_ROW_BYTES = 4 * STREAM_COLUMNS
SIZE = 1024  # rows and input features of the matmul; it has three times as many output features
_HEAD_DIM = 64
RUNS = 5
_I32 = np.dtype(np.int32)


class Machine:
    """Runs the two probes on a device. Each result is the best of several back-to-back runs."""

    def __init__(
        self,
        device: Device,
        program: Program,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device = device
        self.program = program
        self._clock = clock
        self._streamed: DeviceBuffer | None = None
        # Random values, here and in the weights: multiplying zeros takes less power and so raises the clock.
        self._x = device.upload(np.random.default_rng(0).standard_normal((SIZE, SIZE), np.float32))
        self._nothing = device.upload(np.zeros(1, np.int32))

    def bytes_per_s(self, num_bytes: int) -> float:
        """Return the bandwidth of reading about `num_bytes`. Caches make smaller reads faster."""
        rows = max(1, round(num_bytes / STREAM_ROW_BYTES))
        if self._streamed is None or self._streamed.shape[0] != rows:
            self._streamed = None  # frees the old buffer before allocating the new one
            self._streamed = self._device.allocate((rows, STREAM_COLUMNS), _I32)
        return rows * STREAM_ROW_BYTES / self._best_s("stream", self._streamed, self._nothing)

    def row_sums(self, x: DeviceBuffer) -> DeviceBuffer:
        """Return the sum of each row of `x` [rows, STREAM_COLUMNS] i32, as i32."""
        [sums] = self.program.submit("stream", [x, self._nothing]).wait()
        return sums

    def flops_per_s(self) -> float:
        return 2 * 3 * SIZE**3 / self._best_s("matmul", self._x)

    def _best_s(self, entry: str, *arguments: DeviceBuffer) -> float:
        best = float("inf")
        for _ in range(1 + RUNS):
            begin = self._clock()
            self.program.submit(entry, arguments).wait()
            best = min(best, self._clock() - begin)
        return best


def load_machine(device: Device, spec: ModelSpec, options: BuildOptions) -> Machine:
    """Compile the probes for the artefact's target and load them. Takes seconds. Raises BuildError."""
    with tempfile.TemporaryDirectory(prefix="roofline-") as folder:
        vmfb, parameters = Path(folder, "machine.vmfb"), Path(folder, "machine.irpa")
        target = resolve_target(options.device)
        probe = _probe_spec(spec)
        weights = WeightTypes(probe, options, target)
        context = LoweringContext(probe, options, target, weights)
        functions = [_stream(), _matmul(context)]
        declarations = [*weights.declarations(), *context.rendered.texts.values()]
        text = "\n".join(["module @module {", *declarations, *functions, "}"])
        compile_text(text, target.flags, vmfb)
        _write_noise(parameters, parameter_types(probe, options, target))
        return Machine(device, device.load_program(vmfb, [parameters], "module"))


def _probe_spec(spec: ModelSpec) -> ModelSpec:
    """Return the spec of one layer with SIZE x SIZE matrices, so that the peak is the same for all models."""
    heads = SIZE // _HEAD_DIM
    attention = Attention(heads=heads, kv_heads=heads, head_dim=_HEAD_DIM, rope=None)
    return replace(
        spec,
        vocab_size=SIZE,
        hidden_size=SIZE,
        layers=((attention, MLP(features=SIZE)),),
    )


def _matmul(context: LoweringContext) -> str:
    e = Emitter()
    x = Tensor("%x", (SIZE, SIZE), "f32")
    values = Values({"x": x})
    norm = Norm("x", "normed", "blk.0.attn_norm.weight")
    linear = Linear("normed", "qkv", "blk.0.attn_qkv.weight")
    make_lowering(context, choose(context)).lower(e, [norm, linear], values, ["qkv"])
    return _function("matmul", e, x, values["qkv"])


def _stream() -> str:
    e = Emitter()
    rows = e.value(f"tensor.dim %x, {e.constant(0)} : tensor<?x{STREAM_COLUMNS}xi32>")
    x = Tensor("%x", (rows, STREAM_COLUMNS), "i32")
    body = "  %sum = arith.addi %out, %a : i32\n  linalg.yield %sum : i32"
    sums = e.elementwise("rc", ("r", (rows,), "i32"), [(x, "rc")], body, e.fill("0", (rows,), "i32"))
    # An argument that is not used: shortfin 3.9 crashes if all arguments are buffers from `allocate`.
    return _function("stream", e, x, sums, "%nothing: tensor<1xi32>")


def _function(name: str, e: Emitter, x: Tensor, result: Tensor, *unused: str) -> str:
    body = "\n".join(e.lines)
    arguments = ", ".join((f"{x.name}: {x.type}", *unused))
    return (
        f"func.func @{name}({arguments}) -> {result.type} {{\n{body}\n"
        f"return {result.name} : {result.type}\n}}"
    )


def _write_noise(path: Path, types: StoredTypes) -> None:
    rng = np.random.default_rng(0)
    values = {
        name: (0.1 * rng.standard_normal(shape, np.float32)).astype(MLIR_DTYPES[dtype])
        if dtype != "i8"
        else rng.integers(-128, 128, shape, np.int8)
        for name, (shape, dtype) in types.items()
    }
    entries = [ArchiveEntry(name, value.nbytes) for name, value in values.items()]
    write_archive(path, entries, (value.tobytes() for value in values.values()))


MIN_RUNS = 3
MIN_SAMPLE_S = 0.25  # total time of the back-to-back runs that give one sample, their median


@dataclass(frozen=True, slots=True)
class Sample:
    """One repeat of one case: the entry's time, and the machine's speeds measured right after it."""

    time_s: float
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """A case and its samples, one per repeat."""

    case: Case
    work: Work
    samples: tuple[Sample, ...]

    @property
    def time_s(self) -> float:
        return median(sample.time_s for sample in self.samples)

    @property
    def min_time_s(self) -> float:
        return min(sample.time_s for sample in self.samples)

    @property
    def floor_s(self) -> float:
        return median(self._floor_s(sample) for sample in self.samples)

    @property
    def ratios(self) -> list[float]:
        """Each repeat's time divided by its floor (minimum time)."""
        return [sample.time_s / self._floor_s(sample) for sample in self.samples]

    @property
    def is_memory_bound(self) -> bool:
        return self.work.is_memory_bound(
            median(s.bytes_per_s for s in self.samples), median(s.flops_per_s for s in self.samples)
        )

    def _floor_s(self, sample: Sample) -> float:
        return self.work.floor_s(sample.bytes_per_s, sample.flops_per_s)


def measure(
    cases: Sequence[tuple[Case, Work]],
    runner: BatchRunner,
    machine: Machine,
    repeats: int,
    on_sample: Callable[[Case], None],
) -> list[Result]:
    """Take `repeats` samples of every case, one of each case per round; call `on_sample` before each."""
    samples: dict[int, list[Sample]] = {index: [] for index in range(len(cases))}
    for _ in range(repeats):
        for index, (case, work) in enumerate(cases):
            on_sample(case)
            time_s = sample_s(runner, case.batch)
            samples[index].append(Sample(time_s, machine.bytes_per_s(work.num_bytes), machine.flops_per_s()))
    return [Result(case, work, tuple(samples[index])) for index, (case, work) in enumerate(cases)]


def sample_s(runner: BatchRunner, batch: Batch) -> float:
    """Return the median time of back-to-back invocations, after one unmeasured invocation."""
    runner.run(batch)
    times: list[float] = []
    while len(times) < MIN_RUNS or sum(times) < MIN_SAMPLE_S:
        before = runner.device_s
        runner.run(batch)
        times.append(runner.device_s - before)
    return median(times)
