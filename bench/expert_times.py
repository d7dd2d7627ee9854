"""Checks and times the kernels of routed experts that bench/tune_experts.py compiled into this folder.

    python3 expert_times.py --json times.json

Results are compared with numpy's in f32 for a few rows. Times are of launches back to back in a CUDA graph,
the median of some graphs; launches take other experts in turn, so that weights come from memory. `bits` is a
checksum of the first row's result: tiles with the same one add in the same order. GB/s counts the weights of
the experts that have rows, and TFLOP/s the products of rows.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda_driver import Cuda, CudaError
from kernel_times import F32, assemble_all, from_bf16, seconds_of, to_bf16

FOLDER = Path(__file__).parent
MAX_ERROR = 1e-2  # of results, relative to their norm
GROUP = 16  # features per partial sum of squares
LIMIT, SLOPE = 7.0, 1.702  # of gpt-oss's activation
STRIDE = 16  # slots of page 0, which belongs to padding
DISTINCT = 251  # distinct rows of a weight; not a power of two, so that experts differ

Entry = Mapping[str, Any]  # of kernels.json
Array = npt.NDArray[Any]
_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i64": 8, "i32": 4, "i8": 1}
_SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


@dataclass(frozen=True, slots=True)
class Time:
    """The time of one kernel for a number of tokens; `error` is relative."""

    kind: str
    tokens: int
    tile: str
    seconds: float
    error: float
    bits: int
    registers: int
    spilled_bytes: int
    weight_bytes: int
    flops: int

    @property
    def line(self) -> str:
        giga, tera = self.weight_bytes / self.seconds / 1e9, self.flops / self.seconds / 1e12
        remarks = [
            *([] if self.error < MAX_ERROR else ["WRONG"]),
            *([f"spills {self.spilled_bytes}"] if self.spilled_bytes else []),
        ]
        return (
            f"{self.kind:>9} {self.tokens:5} {self.tile:>18} {self.seconds * 1e6:8.1f} us {giga:6.0f} GB/s "
            f"{tera:6.1f} TFLOP/s {self.registers:4} registers bits {self.bits:08x} error {self.error:.0e} "
            f"{' '.join(remarks)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="KIND")
    parser.add_argument("--json", type=Path, help="write every time to this file")
    parser.add_argument("--jobs", type=int, default=8, help="kernels assembled at once")
    args = parser.parse_args()
    table = [each for each in json.loads((FOLDER / "kernels.json").read_text()) if args.only in each["kind"]]
    images = assemble_all(FOLDER, [each["file"] for each in table], args.jobs)
    cuda = Cuda()
    print(cuda.name, f"{len(table)} kernels", flush=True)
    times = list(_all_times(cuda, table, images))
    for each in sorted(times, key=lambda each: (each.kind, each.tokens, each.seconds)):
        print(each.line)
    if args.json:
        fields = Time.__dataclass_fields__
        args.json.write_text(json.dumps([{name: getattr(each, name) for name in fields} for each in times]))


def _all_times(cuda: Cuda, table: Sequence[Entry], images: Sequence[bytes]) -> Iterator[Time]:
    for kind in dict.fromkeys(each["kind"] for each in table):
        group = [(entry, image) for entry, image in zip(table, images, strict=True) if entry["kind"] == kind]
        weights = _Weights(cuda, group[0][0])
        for entry, image in group:
            for tokens in entry["tokens"] if image else ():
                try:
                    yield _time(cuda, entry, image, tokens, weights)
                except CudaError as error:
                    print(f"{entry['file']} with {tokens} tokens: {error}", flush=True)
        weights.free()


def _time(cuda: Cuda, entry: Entry, image: bytes, tokens: int, weights: _Weights) -> Time:
    function = cuda.load(image, entry["name"], entry["threads"], entry["shared_bytes"])
    batch = _Batch(cuda, entry, tokens, weights)
    grid = [
        each if isinstance(each, int) else -(-batch.sizes[each["operand"]] // each["size"])
        for each in entry["grid"]
    ]
    numbers = [batch.sizes[name] for name in entry["constants"]]
    turn = count()

    def launch() -> None:
        cuda.launch(function, grid, batch.addresses(next(turn)), numbers)

    launch()
    got, expected = batch.result(), batch.expected()
    error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    seconds = seconds_of(cuda, launch)
    batch.free()
    used = len(np.unique(batch.chosen[0])) if weights.shape else 0
    return Time(
        kind=entry["kind"],
        tokens=tokens,
        tile=entry["tile"],
        seconds=seconds,
        error=error,
        bits=zlib.crc32(np.ascontiguousarray(got[0]).tobytes()),
        registers=function.registers,
        spilled_bytes=function.spilled_bytes,
        weight_bytes=used * weights.bytes_of_expert,
        flops=2 * batch.sizes["rows"] * int(np.prod(weights.shape)) if weights.shape else 0,
    )


class _Weights:
    """A kernel's expert matrices: DISTINCT rows, repeated; as floats here and packed on the device."""

    def __init__(self, cuda: Cuda, entry: Entry) -> None:
        self._cuda = cuda
        hidden, features = entry["hidden"], entry["features"]
        shapes = {"gated": (2 * features, hidden), "multiply": (hidden, features)}
        self.shape: tuple[int, int] | None = shapes.get(entry["kind"])
        self.memory: dict[str, int] = {}
        if self.shape is None:
            return
        rng, (out_features, in_features) = np.random.default_rng(3), self.shape
        codes = rng.integers(0, 16, (DISTINCT, in_features)).astype(np.uint8)
        scales = (rng.uniform(0.1, 0.3, (DISTINCT, in_features // 32)) * in_features**-0.5).astype(np.float16)
        self._rows = np.where(codes > 7, -1, 1) * _SIZES[codes & 7] * 2 * np.repeat(scales, 32, axis=1)
        self.bias = rng.standard_normal((entry["count"], out_features), np.float32)
        every = np.resize(np.arange(DISTINCT), entry["count"] * out_features)
        halves = codes.reshape(DISTINCT, -1, 2, 16)
        packed = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(DISTINCT, -1)
        for name, array in (("w", packed[every]), ("scales", scales[every]), ("bias", self.bias)):
            self.memory[name] = cuda.allocate(array.nbytes)
            cuda.upload(self.memory[name], array.tobytes())

    def of_expert(self, expert: int) -> F32:
        assert self.shape
        at = np.arange(self.shape[0]) + expert * self.shape[0]
        rows: F32 = self._rows[at % DISTINCT].astype(np.float32)
        return rows

    @property
    def bytes_of_expert(self) -> int:
        out_features, in_features = self.shape or (0, 0)
        return out_features * in_features * 18 // 32

    def free(self) -> None:
        for address in self.memory.values():
            self._cuda.free(address)


class _Batch:
    """A kernel's operands for a number of tokens, with several choices of experts."""

    def __init__(self, cuda: Cuda, entry: Entry, tokens: int, weights: _Weights) -> None:
        self._cuda, self._entry, self._weights = cuda, entry, weights
        experts, per_token, tile_rows = entry["count"], entry["per_token"], entry["tile_rows"]
        rows = tokens * per_token
        tiles = min(rows, experts) + (rows - min(rows, experts)) // tile_rows
        self.sizes = {"tokens": tokens, "rows": rows, "tiles": tiles, "places": tiles * tile_rows}
        rng = np.random.default_rng(tokens)
        self._logits = rng.standard_normal((tokens, experts), np.float32)
        first = np.argsort(-self._logits, axis=1)[:, :per_token].astype(np.int32)
        self.chosen = [(first + turn * per_token) % experts for turn in range(experts // per_token)]
        self._tables = [_sorted(each.ravel(), experts, tiles, tile_rows) for each in self.chosen]
        self._inputs = self._make_inputs(rng)
        own = [name for name in entry["buffers"] if name not in weights.memory]
        self._memory = {name: cuda.allocate(self._num_bytes(name)) for name in own}
        for name, address in self._memory.items():
            cuda.fill(address, self._num_bytes(name), 0xFF)
            if name in self._inputs:
                cuda.upload(address, _encoded(self._inputs[name], entry["buffers"][name][0]))
        self._turns = [
            {} if turn == 0 or not weights.shape else self._upload(*self._tables[turn])
            for turn in range(len(self._tables))
        ]
        cuda.wait()

    def _make_inputs(self, rng: np.random.Generator) -> dict[str, Array]:
        entry, tokens, rows = self._entry, self.sizes["tokens"], self.sizes["rows"]
        order, tile_experts = self._tables[0]
        is_gated = entry["kind"] == "gated"
        in_rows, in_features = (tokens, entry["hidden"]) if is_gated else (rows, entry["features"])
        return {
            "x": from_bf16(to_bf16(rng.standard_normal((in_rows, in_features), np.float32))),
            "in_squares": rng.uniform(8, 24, (tokens, entry["hidden"] // GROUP)).astype(np.float32),
            "order": order,
            "tile_experts": tile_experts,
            "logits": self._logits,
            "slots": np.full(tokens, STRIDE),
            **({} if entry["kind"] == "route" else self._routed(rng)),
            "products": rng.standard_normal((rows, entry["hidden"]), np.float32),
            "residual": rng.standard_normal((tokens, entry["hidden"]), np.float32),
            "norm": rng.uniform(0.5, 1.5, entry["hidden"]).astype(np.float32),
        }

    def _routed(self, rng: np.random.Generator) -> dict[str, Array]:
        weights = rng.uniform(0, 1, self.sizes["rows"]).astype(np.float32)
        return {"chosen": self.chosen[0].astype(np.int32), "weights": weights}

    def _upload(self, order: Array, tile_experts: Array) -> dict[str, int]:
        addresses = {}
        for name, array in (("order", order), ("tile_experts", tile_experts)):
            addresses[name] = self._cuda.allocate(array.nbytes)
            self._cuda.upload(addresses[name], array.tobytes())
        return addresses

    def addresses(self, turn: int) -> list[int]:
        """Return the addresses of a kernel's operands, with other experts in each turn."""
        there = {**self._weights.memory, **self._memory, **self._turns[turn % len(self._turns)]}
        return [there[name] for name in self._entry["buffers"]]

    def result(self) -> F32:
        """Return the device's values for the comparison with `expected`."""
        name = {"route": "weights", "sort": "order"}.get(self._entry["kind"], "y")
        dtype, _ = self._entry["buffers"][name]
        data = self._cuda.download(self._memory[name], self._num_bytes(name))
        raw = np.frombuffer(data, {"bf16": np.uint16, "f32": np.float32, "i32": np.int32}[dtype])
        values = from_bf16(raw) if dtype == "bf16" else raw.astype(np.float32)
        if self._entry["kind"] in ("gated", "multiply"):
            return values.reshape(self.sizes["rows"], -1)[self._checked]
        return values[None]

    @property
    def _checked(self) -> list[int]:
        rows = self.sizes["rows"]
        return sorted({0, 1, rows // 2, rows - 1})

    def expected(self) -> F32:
        """Compute with numpy some rows of a matmul, or all results of another kernel."""
        match self._entry["kind"]:
            case "route":
                logits = np.take_along_axis(self._logits, self.chosen[0], axis=1)
                share = np.exp(logits - logits.max(axis=1, keepdims=True))
                weights: F32 = (share / share.sum(axis=1, keepdims=True)).astype(np.float32)
                return weights.reshape(1, -1)
            case "sort":
                order: F32 = self._tables[0][0].astype(np.float32)
                return order[None]
            case "sum":
                shape = self.sizes["tokens"], self._entry["per_token"], -1
                weighted = self._inputs["products"] * self._inputs["weights"][:, None]
                total: F32 = self._inputs["residual"] + weighted.reshape(shape).sum(axis=1)
                return total.reshape(1, -1)
        return np.stack([self._expected_row(row) for row in self._checked])

    def _expected_row(self, row: int) -> F32:
        expert = int(self.chosen[0].ravel()[row])
        matrix, bias = self._weights.of_expert(expert), self._weights.bias[expert]
        if self._entry["kind"] == "multiply":
            product: F32 = matrix @ self._inputs["x"][row] + bias
            return product
        token = row // self._entry["per_token"]
        mean = self._inputs["in_squares"][token].sum() / matrix.shape[1]
        both = matrix @ self._inputs["x"][token] / np.sqrt(mean + self._entry["eps"]) + bias
        gate, up = np.split(both, 2)
        gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT) + 1
        made: F32 = gate / (1 + np.exp(-SLOPE * gate)) * up
        return made

    def free(self) -> None:
        for address in [*self._memory.values(), *(each for turn in self._turns for each in turn.values())]:
            self._cuda.free(address)

    def _num_bytes(self, name: str) -> int:
        dtype, shape = self._entry["buffers"][name]
        return int(np.prod([self.sizes.get(size, size) for size in shape])) * _BYTES[dtype]


def _sorted(chosen: Array, experts: int, tiles: int, tile_rows: int) -> tuple[Array, Array]:
    """Compute the result of sort_by_expert for the rows' experts."""
    order = np.full((tiles, tile_rows), len(chosen), np.int32)
    tile_experts = np.full(tiles, experts, np.int32)
    tile = 0
    for expert in range(experts):
        rows = np.flatnonzero(chosen == expert)
        for first in range(0, len(rows), tile_rows):
            some = rows[first : first + tile_rows]
            order[tile, : len(some)], tile_experts[tile] = some, expert
            tile += 1
    return order.ravel(), tile_experts


def _encoded(values: Array, dtype: str) -> bytes:
    if dtype == "bf16":
        return to_bf16(values).tobytes()
    data: bytes = values.astype({"f32": np.float32, "i64": np.int64, "i32": np.int32}[dtype]).tobytes()
    return data


if __name__ == "__main__":
    main()
