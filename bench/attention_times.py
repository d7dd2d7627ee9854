"""Checks and times the attention kernels that bench/tune_attention.py compiled into this folder.

    python3 attention_times.py                        # every kernel
    python3 attention_times.py --only 8b.prefill --json times.json

Results are compared with numpy's in f32 for a few tokens. Times are of launches back to back in a CUDA graph,
the median of some graphs; the layer rotates, so that keys and values come from memory, as a model's do.
TFLOP/s counts what causal attention needs, GB/s the keys and values of decodes. `now` marks the tile that a
build takes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda_driver import Cuda, CudaError, Function
from kernel_times import F32, assemble_all, from_bf16, seconds_of, to_bf16

FOLDER = Path(__file__).parent
RANDOM_PAGES = 61  # distinct pages, repeated; not a divisor of a batch's number of pages
MAX_ERROR = 2e-2  # of a token's results in bf16, relative to their norm

RESULTS = ("out", "parts", "states")

Entry = Mapping[str, Any]  # of kernels.json
_BYTES = {"bf16": 2, "i8": 1, "f32": 4, "i64": 8, "i32": 4}


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of new tokens, each after some cached tokens."""

    rows: int
    tokens: int
    cached: int

    @property
    def length(self) -> int:
        return self.cached + self.tokens

    @property
    def label(self) -> str:
        return f"{self.rows} x {self.tokens} after {self.cached}"


@dataclass(frozen=True, slots=True)
class Time:
    """The time of one kernel with a batch; `error` is relative."""

    case: str
    batch: str
    tile: str
    is_built: bool
    seconds: float
    error: float
    registers: int
    spilled_bytes: int
    cache_bytes: int
    flops: int

    @property
    def line(self) -> str:
        giga, tera = self.cache_bytes / self.seconds / 1e9, self.flops / self.seconds / 1e12
        remarks = [
            *(["now"] if self.is_built else []),
            *(["WRONG"] if not self.error < MAX_ERROR else []),
            *([f"spills {self.spilled_bytes}"] if self.spilled_bytes else []),
        ]
        return (
            f"{self.case:>12} {self.batch:>21} {self.tile:>16} {self.seconds * 1e6:8.1f} us {giga:6.0f} GB/s "
            f"{tera:6.1f} TFLOP/s {self.registers:4} registers error {self.error:.0e} {' '.join(remarks)}"
        )


def main() -> None:
    args = _parse()
    table = [each for each in json.loads((FOLDER / "kernels.json").read_text()) if args.only in each["case"]]
    images = assemble_all(FOLDER, [each["file"] for each in table], args.jobs)
    cuda = Cuda()
    print(cuda.name, f"{len(table)} kernels", flush=True)
    times: list[Time] = []
    for _, group in groupby(zip(table, images, strict=True), lambda pair: str(pair[0]["case"])):
        made = list(group)
        for sizes in made[0][0]["batches"]:
            found = sorted(_times_of(cuda, made, Batch(*sizes)), key=lambda each: each.seconds)
            for n, each in enumerate(found):
                if n < args.show or each.is_built:
                    print(each.line, flush=True)
            times += found
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in times]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in MODEL.KIND")
    parser.add_argument("--show", type=int, default=5, help="lines for each case and batch")
    parser.add_argument("--json", type=Path, help="write every time to this file")
    parser.add_argument("--jobs", type=int, default=8, help="kernels assembled at once")
    return parser.parse_args()


def _times_of(cuda: Cuda, group: Sequence[tuple[Entry, bytes]], batch: Batch) -> Iterator[Time]:
    operands = _Operands(cuda, [entry for entry, _ in group], batch)
    expected = operands.expected()
    for entry, image in group:
        if not image:
            continue
        try:
            function = cuda.load(image, entry["name"], entry["threads"], entry["shared_bytes"])
            yield _time(cuda, entry, function, operands, expected)
        except CudaError as error:
            print(f"{entry['file']}, {batch.label}: {error}", flush=True)
    operands.free()


def _time(cuda: Cuda, entry: Entry, function: Function, operands: _Operands, expected: F32) -> Time:
    batch, turn = operands.batch, count()
    grid = [each if isinstance(each, int) else operands.count(each, entry) for each in entry["grid"]]
    addresses = operands.addresses(entry)

    def launch_in(layer: int) -> None:
        cuda.launch(function, grid, addresses, [*operands.numbers, layer])

    def launch() -> None:
        launch_in(next(turn) % entry["layers"])

    operands.upload_lengths(operands.ragged)
    for names in (("counters", *RESULTS), RESULTS):  # a launch must leave its counters at 0
        operands.reset(names)
        launch_in(entry["layers"] - 1)
    operands.upload_lengths(np.full(batch.rows, batch.cached))
    differences = np.linalg.norm(operands.result() - expected, axis=1)
    error = float(np.max(differences / np.linalg.norm(expected, axis=1)))
    heads, kv_heads, head_dim = entry["heads"]
    cache_dtype, _ = entry["buffers"]["cache"]
    pairs = batch.rows * sum(range(batch.cached + 1, batch.length + 1))
    return Time(
        case=entry["case"],
        batch=batch.label,
        tile=entry["tile"],
        is_built=entry["is_built"],
        seconds=seconds_of(cuda, launch),
        error=error,
        registers=function.registers,
        spilled_bytes=function.spilled_bytes,
        cache_bytes=2 * batch.rows * batch.length * kv_heads * head_dim * _BYTES[cache_dtype],
        flops=4 * pairs * heads * head_dim,
    )


class _Operands:
    """A batch's operands, on the host and on the device, shared by all kernels of a case."""

    def __init__(self, cuda: Cuda, entries: Sequence[Entry], batch: Batch) -> None:
        self.batch = batch
        self._cuda = cuda
        self._entry = entry = entries[0]
        self._width = -(-batch.length // entry["stride"])
        self._tokens = batch.rows * batch.tokens
        self._sizes = {
            "tokens": self._tokens,
            "rows": batch.rows,
            "width": self._width,
            "pages": batch.rows * self._width + 1,
        }
        rng = np.random.default_rng(7)
        _, page_elements = entry["buffers"]["cache"][1]
        self._q = _rounded(rng, (self._tokens, entry["buffers"]["q"][1][1]))
        self._is_bytes = entry["buffers"]["cache"][0] == "i8"
        self._pages = _pages(rng, page_elements, entry)
        self._blocks = rng.permutation(np.arange(1, self._sizes["pages"])).reshape(batch.rows, -1)
        most = max(entries, key=lambda each: int(each["most_splits"] or 0))
        self._memory = {name: cuda.allocate(self._num_bytes(most, name)) for name in most["buffers"]}
        self._most = most
        self.ragged = batch.cached * np.arange(1, batch.rows + 1) // batch.rows
        self._upload_integers("offsets", np.arange(batch.rows) * batch.tokens)
        self._upload_integers("blocks", self._blocks)
        cuda.upload(self._memory["q"], to_bf16(self._q).tobytes())
        self._upload_cache()

    @property
    def numbers(self) -> list[int]:
        """The kernels' i32 arguments: tokens, rows, width."""
        return [self._tokens, self.batch.rows, self._width]

    def count(self, tiles: Mapping[str, Any], entry: Entry) -> int:
        """Return the number of workgroups in one dimension of the grid."""
        splits = min(-(-self._width * entry["stride"] // entry["split"]), entry["most_splits"] or 1)
        sizes = {**self._sizes, "splits": splits}
        more = sizes[tiles["more"]] if tiles["more"] else 0
        return int(-(-sizes[tiles["operand"]] // tiles["size"]) + more)

    def addresses(self, entry: Entry) -> list[int]:
        return [self._memory[name] for name in entry["buffers"]]

    def reset(self, names: Sequence[str]) -> None:
        """Fill results with NaN and counters with 0, if they are in `names`."""
        self._cuda.wait()
        for name in self._memory.keys() & set(names):
            value = 0 if name == "counters" else 0xFF
            self._cuda.fill(self._memory[name], self._num_bytes(self._most, name), value)
        self._cuda.wait()

    def result(self) -> F32:
        """Return the rows of `out` that `expected` computes."""
        data = self._cuda.download(self._memory["out"], self._num_bytes(self._most, "out"))
        return from_bf16(np.frombuffer(data, np.uint16)).reshape(self._q.shape)[self._compared()]

    def upload_lengths(self, cached: npt.NDArray[np.int64]) -> None:
        """Let each row have as many cached tokens, which must be at most the batch's."""
        self._cuda.wait()
        self._upload_integers("starts", cached)
        self._upload_integers("seq_lens", cached + self.batch.tokens)

    def _upload_integers(self, name: str, values: npt.NDArray[np.int64]) -> None:
        if name in self._memory:
            self._cuda.upload(self._memory[name], values.astype(np.int64).tobytes())

    def expected(self) -> F32:
        """Compute the `_compared` tokens of `ragged` rows with numpy, in the last layer."""
        return np.stack([self._attended(token) for token in self._compared()])

    def free(self) -> None:
        for address in self._memory.values():
            self._cuda.free(address)

    def _compared(self) -> list[int]:
        """Return the first, middle and last token of some rows."""
        rows, tokens = self.batch.rows, self.batch.tokens
        some = {row % rows for row in (0, 1, rows // 3, rows // 2, -2, -1)}
        return sorted({row * tokens + at for row in some for at in (0, tokens // 2, tokens - 1)})

    def _attended(self, token: int) -> F32:
        row, at = divmod(token, self.batch.tokens)
        heads, kv_heads, head_dim = self._entry["heads"]
        shape = (RANDOM_PAGES, self._entry["layers"], 2, self._entry["stride"], -1)
        pages = self._values(self._pages.reshape(shape)[self._blocks[row] % RANDOM_PAGES, -1])
        seen = int(self.ragged[row]) + at + 1
        slots = pages.swapaxes(0, 1).reshape(2, -1, kv_heads, head_dim)[:, :seen]
        keys, values = np.repeat(slots, heads // kv_heads, axis=2)
        scores = np.einsum("hd,nhd->hn", self._q[token].reshape(heads, head_dim), keys) / np.sqrt(head_dim)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        attended: F32 = np.einsum("hn,nhd->hd", weights, values).reshape(-1)
        return attended

    def _values(self, rows: npt.NDArray[Any]) -> F32:
        """Return the elements of cache rows."""
        if not self._is_bytes:
            values: F32 = rows
            return values
        _, kv_heads, head_dim = self._entry["heads"]
        elements = kv_heads * head_dim
        scales = np.ascontiguousarray(rows[..., elements : elements + 4 * kv_heads]).view(np.float32)
        heads = rows[..., :elements].reshape(*rows.shape[:-1], kv_heads, head_dim)
        values = (heads * scales[..., None]).reshape(*rows.shape[:-1], elements)
        return values

    def _upload_cache(self) -> None:
        """Fill page n with random page n % RANDOM_PAGES; each copy doubles the filled part."""
        address, total = self._memory["cache"], self._num_bytes(self._most, "cache")
        data = self._pages.tobytes() if self._is_bytes else to_bf16(self._pages).tobytes()
        self._cuda.upload(address, data[:total])
        done = len(data)
        while done < total:
            some = min(done, total - done)
            self._cuda.copy(address + done, address, some)
            done += some

    def _num_bytes(self, entry: Entry, name: str) -> int:
        dtype, shape = entry["buffers"][name]
        return int(np.prod([self._sizes.get(size, size) for size in shape])) * _BYTES[dtype]


def _pages(rng: np.random.Generator, elements: int, entry: Entry) -> npt.NDArray[Any]:
    """Return random pages: f32 that are bf16, or i8 with the scales of heads after the elements of a row."""
    if entry["buffers"]["cache"][0] != "i8":
        return _rounded(rng, (RANDOM_PAGES, elements))
    _, kv_heads, head_dim = entry["heads"]
    rows = RANDOM_PAGES * entry["layers"] * 2 * entry["stride"]
    pages = rng.integers(-127, 128, (rows, RANDOM_PAGES * elements // rows), np.int8)
    scales = (0.01 * 2.0 ** rng.uniform(-6, 1, (rows, kv_heads))).astype(np.float32)
    values = kv_heads * head_dim
    pages[:, values : values + 4 * kv_heads] = scales.view(np.int8)
    return pages.reshape(RANDOM_PAGES, elements)


def _rounded(rng: np.random.Generator, shape: tuple[int, ...]) -> F32:
    return from_bf16(to_bf16(rng.standard_normal(shape, np.float32)))


if __name__ == "__main__":
    main()
