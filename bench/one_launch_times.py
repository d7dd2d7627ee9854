"""Times the kernels that bench/tune_one_launch.py compiled into this folder.

    python3 one_launch_times.py                       # every kernel
    python3 one_launch_times.py --only 8b.bf16.1

Weights are random. Logits with other bits than those of the case's first kernel are marked. A time is the
median of some graphs, each of several launches of a whole decode; GB/s counts weights, keys and values. If
the workgroups of a kernel do not all run at the same time, each launch takes seconds and leaves NaN.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda_driver import Cuda, CudaError, Function
from kernel_times import assemble_all, to_bf16

FOLDER = Path(__file__).parent
_BYTES = {"bf16": 2, "f16": 2, "i8": 1, "f8E4M3FN": 1, "f32": 4, "i64": 8, "i32": 4}
LAUNCHES, REPEATS = 8, 7

Entry = Mapping[str, Any]  # of kernels.json


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    of_only = "cases with this in MODEL.WEIGHTS.ROWS.CONTEXT"
    parser.add_argument("--only", default="", metavar="TEXT", help=of_only)
    parser.add_argument("--jobs", type=int, default=8, help="kernels assembled at once")
    args = parser.parse_args()
    table = [each for each in json.loads((FOLDER / "kernels.json").read_text()) if args.only in each["case"]]
    images = assemble_all(FOLDER, [each["file"] for each in table], args.jobs)
    cuda = Cuda()
    print(cuda.name, f"{len(table)} kernels", flush=True)
    for case, group in groupby(zip(table, images, strict=True), lambda pair: str(pair[0]["case"])):
        made = list(group)
        operands, expected = _Operands(cuda, made[0][0]), b""
        for entry, image in made:
            try:
                function = cuda.load(image, entry["name"], entry["threads"], entry["shared_bytes"])
            except CudaError as error:
                print(f"{case} {entry['variant']}: {error}", flush=True)
                continue
            seconds, logits = _measured(cuda, entry, function, operands)
            expected = expected or logits
            print(_line(entry, function, seconds, operands.num_bytes, _remark(logits, expected)), flush=True)
        operands.free()


def _measured(cuda: Cuda, entry: Entry, function: Function, operands: _Operands) -> tuple[float, bytes]:
    """Return the time of a launch in seconds, and its logits."""
    operands.fit(entry)

    def launch() -> None:
        cuda.fill_later(operands.memory["barrier"], 1, 0)
        cuda.launch(function, [entry["workgroups"]], operands.addresses(entry), [operands.width])

    def launch_some() -> None:
        for _ in range(LAUNCHES):
            launch()

    launch()
    logits = operands.logits()
    return statistics.median(cuda.times_s(launch_some, REPEATS)) / LAUNCHES, logits


def _line(entry: Entry, function: Function, seconds: float, num_bytes: int, remark: str) -> str:
    giga = num_bytes / seconds / 1e9
    return (
        f"{entry['case']:>15} {entry['variant']:>16} {seconds * 1e6:8.1f} us {giga:6.0f} GB/s "
        f"{function.registers:4} registers, spills {function.spilled_bytes}, "
        f"{entry['shared_bytes'] >> 10} KiB{remark}"
    )


def _remark(logits: bytes, expected: bytes) -> str:
    if not np.isfinite(np.frombuffer(logits, np.float32)).all():
        return " NOT FINITE"
    return "" if logits == expected else f" OTHER BITS, {_difference(logits, expected):.1e}"


def _difference(logits: bytes, expected: bytes) -> float:
    ours, others = (np.frombuffer(each, np.float32).astype(np.float64) for each in (logits, expected))
    return float(np.linalg.norm(ours - others) / np.linalg.norm(others))


class _Operands:
    """The operands of a case, on the device."""

    def __init__(self, cuda: Cuda, entry: Entry) -> None:
        self._cuda = cuda
        self._entry = entry
        self._rng = np.random.default_rng(7)
        rows, context, stride = entry["rows"], entry["context"], entry["stride"]
        self.width = -(-context // stride)
        self._sizes = {"width": self.width, "pages": rows * self.width + 1}
        self._own: list[int] = []
        self._patterns: dict[str, tuple[int, int]] = {}
        self.num_bytes = 0
        self.memory: dict[str, int] = {}
        for name, (dtype, shape) in entry["buffers"].items():
            is_random = name == "cache" or name.startswith("embedding")
            self.memory[name] = self._random(dtype, shape) if is_random else self._allocated(dtype, shape)
        pages = self._rng.permutation(np.arange(1, self._sizes["pages"])).reshape(rows, -1)
        lengths = np.full(rows, context - 1)
        self._upload("blocks", pages)
        self._upload("starts", lengths)
        self._upload("seq_lens", lengths + 1)
        self._upload("slots", pages[:, -1] * entry["page_rows"] + (context - 1) % stride)
        self._upload("ids", self._rng.integers(0, entry["vocab"], rows))
        angles = self._rng.uniform(0, 6, entry["buffers"]["rotary"][1])
        cuda.upload(self.memory["rotary"], np.cos(angles).astype(np.float32).tobytes())
        self._upload("weights", self._table())
        cache_dtype, (_, page) = entry["buffers"]["cache"]
        self.num_bytes += rows * context * page // stride * _BYTES[cache_dtype]
        cuda.wait()

    def fit(self, entry: Entry) -> None:
        """Have room for the work of this kernel, and no counts of an abandoned launch."""
        [size] = entry["buffers"]["work"][1]
        self.memory["work"] = self._allocate(size)
        self._cuda.fill(self.memory["work"], size, 0xFF)
        self._cuda.fill(self.memory["counters"], self._size("counters"), 0)
        self._cuda.wait()

    def addresses(self, entry: Entry) -> list[int]:
        return [self.memory[name] for name in entry["buffers"]]

    def logits(self) -> bytes:
        return self._cuda.download(self.memory["logits"], self._size("logits"))

    def free(self) -> None:
        for address in self._own:
            self._cuda.free(address)

    def _table(self) -> npt.NDArray[np.int64]:
        entry, columns, layers = self._entry, self._entry["columns"], self._entry["layers"]
        table = np.zeros((layers + 1, entry["num_columns"]), np.int64)
        for layer in range(layers):
            for field, parameters in entry["parameters"].items():
                for n, (shape, dtype) in enumerate(parameters):
                    table[layer, columns[field] + n] = self._weight(dtype, shape)
        hidden = [entry["hidden"]]
        table[layers, columns["attention_norm"]] = self._weight("f32", hidden)
        for n, (shape, dtype) in enumerate(entry["head"]):
            table[layers, columns["qkv"] + n] = self._weight(dtype, shape)
        return table

    def _weight(self, dtype: str, shape: list[int]) -> int:
        self.num_bytes += int(np.prod(shape)) * _BYTES[dtype]
        return self._random(dtype, shape)

    def _random(self, dtype: str, shape: list[Any]) -> int:
        """Return memory filled with random elements, by copies of at most 32 MiB of them."""
        address, size = self._allocated(dtype, shape), self._num_bytes(dtype, shape)
        if dtype not in self._patterns:
            count = (64 << 20) // _BYTES[dtype]
            pattern = self._allocate(64 << 20)
            self._cuda.upload(pattern, self._values(dtype, count))
            self._patterns[dtype] = pattern, 0
        pattern, offset = self._patterns[dtype]
        done = 0
        while done < size:
            offset = (offset + 999_424) % (32 << 20)
            some = min(32 << 20, size - done)
            self._cuda.copy(address + done, pattern + offset, some)
            done += some
        self._patterns[dtype] = pattern, offset
        return address

    def _values(self, dtype: str, count: int) -> bytes:
        if dtype == "i8":
            return self._rng.integers(-128, 128, count, np.int8).tobytes()
        if dtype == "f8E4M3FN":  # magnitudes from 1/64 to 1/8
            signs = self._rng.integers(0, 2, count, np.uint8) << 7
            return (signs | self._rng.integers(0x08, 0x28, count, np.uint8)).tobytes()
        values = self._rng.standard_normal(count, np.float32)
        if dtype == "f32":  # norms
            return (1 + 0.1 * values).tobytes()
        if dtype == "f16":  # scales
            return (0.003 + 0.001 * np.abs(values)).astype(np.float16).tobytes()
        return to_bf16(0.03 * values).tobytes()

    def _upload(self, name: str, values: npt.NDArray[np.int64]) -> None:
        self._cuda.upload(self.memory[name], values.astype(np.int64).tobytes())

    def _size(self, name: str) -> int:
        return self._num_bytes(*self._entry["buffers"][name])

    def _allocated(self, dtype: str, shape: list[Any]) -> int:
        return self._allocate(self._num_bytes(dtype, shape))

    def _allocate(self, size: int) -> int:
        self._own.append(self._cuda.allocate(size))
        return self._own[-1]

    def _num_bytes(self, dtype: str, shape: list[Any]) -> int:
        return int(np.prod([self._sizes.get(size, size) for size in shape])) * _BYTES[dtype]


if __name__ == "__main__":
    main()
