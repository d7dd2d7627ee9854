"""Checks and times the matmul kernels that bench/tune_matmul.py compiled into this folder.

    python3 matmul_times.py                        # every kernel
    python3 matmul_times.py --only 8b.gate_up --json times.json
    python3 matmul_times.py --alternate 512        # only checks

Results are compared with numpy's in f32 for a few tokens. Times are of launches back to back in a CUDA graph,
the median of some graphs; the weights rotate among copies that are larger than the L2 cache together, as a
model's layers are. `bits` is a checksum of token 0's result: tiles with the same one add in the same order.
`all` is a checksum of all tokens' results. GB/s counts the weights only. `now` marks the tile that a build
takes.

With --alternate, kernels of different matmuls follow each other without a pause. All that load by TMA have
their tensor maps at one address. Every result must have the bits of the kernel alone: a map of the kernel
before, left in the TMA unit's cache, would change them.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda_driver import Cuda, CudaError, Function
from kernel_times import F32, assemble_all, from_bf16, seconds_of, to_bf16

FOLDER = Path(__file__).parent
ROTATED_BYTES = 240 << 20  # several times the L2 of an H200
MAX_ERROR = 1e-2  # of results, relative to their norm
ROUNDS = 24  # of launches in turns
FP8_GROUP = 128  # activations per scale
GROUP = 16  # features per partial sum of squares

Entry = Mapping[str, Any]  # of kernels.json
_STORED = {"bf16": np.uint16, "i8": np.int8}  # a dtype's bits
_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i64": 8, "i8": 1, "f8E4M3FN": 1}


@dataclass(frozen=True, slots=True)
class Time:
    """The time of one kernel for a number of tokens; `error` is relative."""

    case: str
    weights: str
    tokens: int
    tile: str
    is_built: bool
    seconds: float
    error: float
    bits: int
    all_bits: int
    registers: int
    spilled_bytes: int
    weight_bytes: int
    flops: int

    @property
    def line(self) -> str:
        giga, tera = self.weight_bytes / self.seconds / 1e9, self.flops / self.seconds / 1e12
        speed = f"{giga:6.0f} GB/s {tera:6.1f} TFLOP/s"
        remarks = [
            *(["now"] if self.is_built else []),
            *(["WRONG"] if not self.error < MAX_ERROR else []),
            *([f"spills {self.spilled_bytes}"] if self.spilled_bytes else []),
        ]
        return (
            f"{self.case:>14} {self.tokens:5} {self.tile:>18} {self.seconds * 1e6:8.1f} us {speed} "
            f"{self.registers:4} registers bits {self.bits:08x} all {self.all_bits:08x} "
            f"error {self.error:.0e} {' '.join(remarks)}"
        )


def main() -> None:
    args = _parse()
    table = [each for each in json.loads((FOLDER / "kernels.json").read_text()) if args.only in _case(each)]
    images = assemble_all(FOLDER, [each["file"] for each in table], args.jobs)
    cuda = Cuda()
    print(cuda.name, f"{len(table)} kernels", flush=True)
    by_case = groupby(zip(table, images, strict=True), lambda pair: _case(pair[0]))
    groups = [list(group) for _, group in by_case]
    if args.alternate:
        print(_alternate(cuda, groups, args.alternate))
        return
    times = [each for group in groups for each in _times_of_case(cuda, group)]
    for line in _best(times, args.show):
        print(line)
    if args.json:
        fields = Time.__dataclass_fields__
        args.json.write_text(json.dumps([{name: getattr(each, name) for name in fields} for each in times]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="matmuls with this in MODEL.MATMUL")
    parser.add_argument("--show", type=int, default=3, help="lines for each matmul and number of tokens")
    parser.add_argument("--json", type=Path, help="write every time to this file")
    parser.add_argument("--jobs", type=int, default=8, help="kernels assembled at once")
    parser.add_argument("--alternate", type=int, metavar="TOKENS", help="compare kernels in turns with alone")
    return parser.parse_args()


def _case(entry: Entry) -> str:
    return f"{entry['model']}.{entry['case']}"


def _best(times: Sequence[Time], show: int) -> Iterator[str]:
    """Yield lines of the fastest tiles per matmul and number of tokens, and of the tile that a build uses."""
    for tokens in sorted({each.tokens for each in times}):
        for case in dict.fromkeys(each.case for each in times):
            rivals = [each for each in times if (each.case, each.tokens) == (case, tokens)]
            rivals.sort(key=lambda each: each.seconds)
            yield from (each.line for n, each in enumerate(rivals) if n < show or each.is_built)


def _times_of_case(cuda: Cuda, group: Sequence[tuple[Entry, bytes]]) -> list[Time]:
    entries = [entry for entry, _ in group]
    most = max(max(entry["tokens"]) for entry in entries)
    operands = _Operands(cuda, entries, most)
    times = []
    for tokens in sorted({each for entry in entries for each in entry["tokens"]}):
        rows = sorted({0, tokens // 2, tokens - 1})
        expected = _expected(entries[0], operands.inputs, rows)
        for entry, image in group:
            if image and tokens in entry["tokens"]:
                try:
                    times.append(_time(cuda, entry, image, tokens, operands, rows, expected))
                except CudaError as error:
                    print(f"{entry['file']} with {tokens} tokens: {error}", flush=True)
    operands.free()
    return times


def _time(
    cuda: Cuda,
    entry: Entry,
    image: bytes,
    tokens: int,
    operands: _Operands,
    rows: Sequence[int],
    expected: Mapping[str, F32],
) -> Time:
    function, launch = _launcher(cuda, entry, image, tokens, operands)
    operands.poison()
    launch()
    got = {name: operands.rows(name, rows) for name in expected}
    all_bits = operands.all_bits(tokens)
    errors = [np.linalg.norm(got[name] - expected[name]) / np.linalg.norm(expected[name]) for name in got]
    return _time_of(entry, function, tokens, seconds_of(cuda, launch), float(max(errors)), got, all_bits)


def _launcher(
    cuda: Cuda, entry: Entry, image: bytes, tokens: int, operands: _Operands
) -> tuple[Function, Callable[[], None]]:
    """Load a kernel; return it, and a function that launches it."""
    function = cuda.load(image, entry["name"], entry["threads"], entry["shared_bytes"])
    grid = [each if isinstance(each, int) else _count(each, tokens) for each in entry["grid"]]
    numbers = [tokens, 0][: len(entry["constants"])]  # the layer is 0
    turn = count()
    return function, lambda: cuda.launch(function, grid, operands.addresses(entry, next(turn)), numbers)


def _count(tiles: Mapping[str, Any], tokens: int) -> int:
    """Return the number of workgroups along a dimension of the grid."""
    every = -(-tokens // tiles["size"]) * tiles["times"]
    return every if tiles["most"] is None else min(every, int(tiles["most"]))


def _alternate(cuda: Cuda, groups: Sequence[Sequence[tuple[Entry, bytes]]], tokens: int) -> str:
    """Launch a kernel of every matmul in turns; return whether all results equal each kernel's own."""
    cases: list[tuple[_Operands, list[tuple[str, Callable[[], None], int]]]] = []
    for group in groups:
        operands, kernels = _Operands(cuda, [entry for entry, _ in group], tokens), []
        for entry, image in group:
            _, launch = _launcher(cuda, entry, image, tokens, operands)
            operands.poison()
            launch()
            kernels.append((f"{_case(entry)} {entry['tile']}", launch, operands.all_bits(tokens)))
        cases.append((operands, kernels))
    scratch = next(operands.scratch for operands, _ in cases if operands.scratch)
    for operands, _ in cases:
        operands.scratch = scratch + 64  # IREE's alignment, which the kernels round up
    wrong: list[str] = []
    for number in range(ROUNDS):
        # In even rounds, kernels of the same tile follow each other where all cases have it.
        chosen = [
            (operands, *kernels[(number + number % 2 * place) % len(kernels)])
            for place, (operands, kernels) in enumerate(cases)
        ]
        chosen = chosen[number % len(chosen) :] + chosen[: number % len(chosen)]
        for operands, *_ in chosen:
            operands.poison()
        for _, _, launch, _ in chosen:
            launch()
        wrong += [name for operands, name, _, bits in chosen if operands.all_bits(tokens) != bits]
    found = f"WRONG: {', '.join(sorted(set(wrong)))}" if wrong else "all equal"
    return f"{ROUNDS} rounds of {len(cases)} matmuls with {tokens} tokens, one scratch: {found}"


def _time_of(
    entry: Entry,
    function: Function,
    tokens: int,
    seconds: float,
    error: float,
    got: Mapping[str, F32],
    all_bits: int,
) -> Time:
    out_features, in_features = entry["shape"]
    return Time(
        case=_case(entry),
        weights=entry["weights"],
        tokens=tokens,
        tile=entry["tile"],
        is_built=entry["is_built"],
        seconds=seconds,
        error=error,
        bits=zlib.crc32(b"".join(np.ascontiguousarray(values[0]).tobytes() for values in got.values())),
        all_bits=all_bits,
        registers=function.registers,
        spilled_bytes=function.spilled_bytes,
        weight_bytes=_num_weight_bytes(entry),
        flops=2 * tokens * out_features * in_features,
    )


def _num_weight_bytes(entry: Entry) -> int:
    buffers = [entry["buffers"][name] for name in ("w", "scales", "minima") if name in entry["buffers"]]
    return sum(_BYTES[dtype] * int(np.prod(shape)) for dtype, shape in buffers)


class _Operands:
    """A case's operands for up to `tokens` tokens, as numpy arrays and on the device.

    The weight has several copies that together exceed the L2 cache. `scratch`: address of the tensor maps of
    kernels with loads by TMA, 0 if there are none.
    """

    def __init__(self, cuda: Cuda, entries: Sequence[Entry], tokens: int) -> None:
        buffers = {name: each for entry in entries for name, each in entry["buffers"].items()}
        entry = {**entries[0], "buffers": buffers}
        self._cuda = cuda
        self._entry = entry
        self._sizes = {"tokens": tokens, "pages": -(-tokens // entry["stride"])}
        self.inputs = _inputs(entry, tokens)
        self._stored = _stored(entry, self.inputs)
        self._memory = {name: self._upload(name) for name in entry["buffers"]}
        self._weights = [self._memory["w"], *self._copies_of_weight()]
        self.scratch = self._memory.get("scratch", 0)

    def _upload(self, name: str) -> int:
        """Allocate a buffer, fill it if it is an input, and return its address."""
        dtype, _ = self._entry["buffers"][name]
        address = self._cuda.allocate(self._num_bytes(name))
        if name in self._stored:
            self._cuda.upload(address, self._stored[name])
        elif name in self.inputs:
            self._cuda.upload(address, _encoded(self.inputs[name], dtype))
        return address

    def _copies_of_weight(self) -> Iterator[int]:
        num_bytes = self._num_bytes("w")
        for _ in range(max(1, ROTATED_BYTES // num_bytes)):
            address = self._cuda.allocate(num_bytes)
            self._cuda.copy(address, self._memory["w"], num_bytes)
            yield address

    def poison(self) -> None:
        """Fill all results with NaN, except the scratch, which keeps what the launch before wrote."""
        for name in self._memory.keys() - self.inputs.keys() - self._stored.keys() - {"scratch"}:
            self._cuda.fill(self._memory[name], self._num_bytes(name), 0xFF)
        self._cuda.wait()

    def addresses(self, entry: Entry, turn: int) -> list[int]:
        """Return the addresses of a kernel's operands, with another copy of the weight in each turn."""
        weight = self._weights[turn % len(self._weights)]
        known = {**self._memory, "w": weight, "scratch": self.scratch}
        return [known[name] for name in entry["buffers"]]

    def all_bits(self, tokens: int) -> int:
        """Return a checksum of the results of all tokens."""
        names = sorted({"y", "q", "cache", "scaled", "squares"} & self._memory.keys())
        results = [self.rows(name, range(tokens)).tobytes() for name in names]
        return zlib.crc32(b"".join(results))

    def rows(self, name: str, rows: Sequence[int]) -> F32:
        """Return rows of a result [tokens, features]; for the cache, keys and values of tokens."""
        dtype, shape = self._entry["buffers"][name]
        at, features, stride = np.array(rows), shape[-1], self._entry["stride"]
        if name == "cache":
            features //= 2 * stride
            keys = at // stride * 2 * stride + at % stride
            at = np.stack([keys, keys + stride], axis=1)
        data = self._cuda.download(self._memory[name], (int(at.max()) + 1) * features * _BYTES[dtype])
        raw = np.frombuffer(data, _STORED.get(dtype, np.float32)).reshape(-1, features)[at]
        match dtype:
            case "bf16":
                raw = from_bf16(raw)
            case "i8":
                raw = _from_bytes(raw, *self._entry["heads"][1:])
        return raw.reshape(len(rows), -1)

    def free(self) -> None:
        for address in {*self._memory.values(), *self._weights}:
            self._cuda.free(address)

    def _num_bytes(self, name: str) -> int:
        dtype, shape = self._entry["buffers"][name]
        return int(np.prod([self._sizes.get(size, size) for size in shape])) * _BYTES[dtype]


def _inputs(entry: Entry, tokens: int) -> dict[str, F32]:
    """Return random operands of a case, the same for all kernels; fewer tokens use a prefix."""
    out_features, in_features = entry["shape"]
    rng = np.random.default_rng((7, out_features, in_features))  # no matmul has the numbers of another
    # Fewer numbers than weight elements, repeated. Their count is not a power of two, so all rows differ.
    some = rng.standard_normal(min(out_features * in_features, (1 << 22) + 1), np.float32) / in_features**0.5
    inputs = {
        "x": from_bf16(to_bf16(rng.standard_normal((tokens, in_features), np.float32))),
        "w": np.resize(from_bf16(to_bf16(some.astype(np.float32))), (out_features, in_features)),
        "in_squares": rng.uniform(8, 24, (tokens, in_features // GROUP)).astype(np.float32),
        "residual": rng.standard_normal((tokens, out_features), np.float32),
        "norm": rng.uniform(0.5, 1.5, out_features).astype(np.float32),
        "bias": rng.standard_normal(out_features, np.float32),
        "head_norm": rng.uniform(0.5, 1.5, 2 * entry["heads"][2]).astype(np.float32),
    }
    angles = rng.uniform(-3, 3, (tokens, entry["heads"][2] // 2))
    inputs["rotary"] = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    token, stride = np.arange(tokens), entry["stride"]
    inputs["slots"] = (token // stride * 2 * stride + token % stride).astype(np.float32)
    return inputs


def _stored(entry: Entry, inputs: dict[str, F32]) -> dict[str, bytes]:
    """Return a quantised weight's bytes; replace "w" and "x" in `inputs` by the dequantised values."""
    if entry["weights"] == "bf16":
        return {}
    out_features, in_features = entry["shape"]
    rows = np.resize(np.arange(256), out_features)  # 256 distinct rows, so that numpy is fast enough
    rng = np.random.default_rng((9, out_features, in_features))
    if entry["weights"] == "fp8":
        stored, values = _fp8_weight(entry, rng)
        activations, inputs["x"] = _fp8_activations(rng, *inputs["x"].shape)
    else:
        stored, values = _blocks(entry, rng)
        activations = {}
    inputs["w"] = values.astype(np.float32)[rows]
    return {name: each[rows].tobytes() for name, each in stored.items()} | activations


def _blocks(entry: Entry, rng: np.random.Generator) -> tuple[dict[str, npt.NDArray[Any]], F32]:
    bits, size, group, _, in_bf16 = entry["blocks"]
    in_features = entry["shape"][1]
    has_minima = "minima" in entry["buffers"]
    least, most = (0, 16) if has_minima else (-8, 8) if bits == 4 else (-128, 128)
    quants = rng.integers(least, most, (256, in_features))
    scale = 3 / ((most - least) * in_features**0.5)
    scales, wide = _terms(rng, scale, in_features, size, group)
    values = quants * np.repeat(wide, size, axis=1)
    stored = {"w": _packed(quants) if bits == 4 else quants.astype(np.int8), "scales": scales}
    if has_minima:
        stored["minima"], least_values = _terms(rng, -scale * most / 2, in_features, size, group)
        values += np.repeat(least_values, size, axis=1)
        if in_bf16:  # of 4 bits, the minimum is of the quant 8
            stored["minima"] = to_bf16(least_values + (8 * wide if bits == 4 else 0))
    if in_bf16:
        stored["scales"] = to_bf16(wide)
    return stored, values


def _packed(quants: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Pack 4-bit quants: a byte holds elements j and j + 16."""
    halves = quants.astype(np.uint8).reshape(len(quants), -1, 2, 16)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(quants), -1)


def _terms(
    rng: np.random.Generator, mean: float, in_features: int, size: int, group: int
) -> tuple[npt.NDArray[Any], F32]:
    """Return scales or minima as stored for kernels, and their values (see weights/layout.py)."""
    count = in_features // size
    if not group:
        values = (mean * rng.uniform(0.5, 1.5, (256, count))).astype(np.float16)
        return values, values.astype(np.float32)
    shared = (mean / 32 * rng.uniform(0.5, 1.5, (256, in_features // group))).astype(np.float16)
    multiples = rng.integers(16, 49, (256, count)).astype(np.int8)
    both = np.concatenate([shared.view(np.int8), multiples], axis=1)
    wide = np.repeat(shared.astype(np.float32), group // size, axis=1) * multiples
    return np.pad(both, [(0, 0), (0, -both.shape[1] % 4)]), wide


def _fp8_weight(entry: Entry, rng: np.random.Generator) -> tuple[dict[str, npt.NDArray[Any]], F32]:
    in_features = entry["shape"][1]
    quants = _random_e4m3(rng, 256, in_features)
    stored = {"w": quants, "scales": np.full(256, in_features**-0.5, np.float32)}
    return stored, _from_e4m3(quants) * stored["scales"][:, None]


def _fp8_activations(rng: np.random.Generator, tokens: int, features: int) -> tuple[dict[str, bytes], F32]:
    quants = _random_e4m3(rng, tokens, features)
    scales = np.exp2(rng.integers(-1, 2, (tokens, -(-features // FP8_GROUP)))).astype(np.float32)
    values = _from_e4m3(quants) * np.repeat(scales, FP8_GROUP, axis=1)[:, :features]
    return {"x": quants.tobytes(), "x_scales": scales.tobytes()}, values


def _random_e4m3(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.uint8]:
    """Return random numbers with magnitudes from 0.125 to 2."""
    magnitudes = rng.integers(0x28, 0x40, shape).astype(np.uint8)
    return magnitudes | rng.integers(0, 2, shape).astype(np.uint8) << 7


def _from_e4m3(quants: npt.NDArray[np.uint8]) -> F32:
    """Decode normal numbers."""
    exponent, mantissa = (quants >> 3 & 15).astype(np.float32), (quants & 7).astype(np.float32)
    values: F32 = np.where(quants & 0x80, -1, 1) * 2 ** (exponent - 7) * (1 + mantissa / 8)
    return values.astype(np.float32)


def _expected(entry: Entry, inputs: Mapping[str, F32], rows: Sequence[int]) -> dict[str, F32]:
    """Compute rows of each result with numpy."""
    buffers, w = entry["buffers"], inputs["w"]
    product: F32 = inputs["x"][rows] @ w.T
    if "in_squares" in buffers:
        squares = inputs["in_squares"][rows].sum(axis=1, keepdims=True)
        product *= 1 / np.sqrt(squares / w.shape[1] + entry["eps"])
    match entry["kind"]:
        case "gated_linear":
            gate, up = np.split(product, 2, axis=1)
            inner = gate
            if entry["activation"] == "gelu":  # in its approximation with tanh
                inner = 2 * (2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)
            return {"y": gate / (1 + np.exp(-inner)) * up}
        case "project_qkv":
            norm = inputs["head_norm"] if "head_norm" in buffers else None
            if "bias" in buffers:
                product += inputs["bias"]
            return _rotated(entry, product, norm, inputs["rotary"][rows])
    if "residual" not in buffers:
        return {"y": product}
    y = product + inputs["residual"][rows]
    squares = (y * y).reshape(len(rows), -1, GROUP).sum(axis=2)
    return {"y": y, "scaled": y * inputs["norm"], "squares": squares}


def _rotated(entry: Entry, qkv: F32, norm: F32 | None, rotary: F32) -> dict[str, F32]:
    num_q, num_kv, head_dim = entry["heads"]
    heads = qkv.reshape(len(qkv), -1, head_dim)
    if norm is not None:
        normed = heads / np.sqrt((heads * heads).mean(axis=2, keepdims=True) + entry["eps"])
        normed[:, :num_q] *= norm[:head_dim]
        normed[:, num_q:] *= norm[head_dim:]
        heads = np.concatenate([normed[:, : num_q + num_kv], heads[:, num_q + num_kv :]], axis=1)
    low, high = np.split(heads, 2, axis=2)
    cosine, sine = rotary[:, None, 0], rotary[:, None, 1]
    turned = np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=2)
    q, k = turned[:, :num_q], turned[:, num_q : num_q + num_kv]
    cached = np.concatenate([k, heads[:, num_q + num_kv :]], axis=1)
    return {"q": q.reshape(len(qkv), -1), "cache": cached.reshape(len(qkv), -1)}


def _from_bytes(rows: npt.NDArray[np.int8], num_heads: int, head_dim: int) -> F32:
    """Decode cache rows in bytes: the elements of all heads, then an f32 scale for each, then padding."""
    end = num_heads * head_dim
    scales = np.ascontiguousarray(rows[..., end : end + 4 * num_heads]).view(np.float32)
    values: F32 = rows[..., :end].astype(np.float32) * np.repeat(scales, head_dim, axis=-1)
    return values


def _encoded(values: F32, dtype: str) -> bytes:
    if dtype == "bf16":
        return to_bf16(values).tobytes()
    return values.astype({"f32": np.float32, "i64": np.int64}[dtype]).tobytes()


if __name__ == "__main__":
    main()
