"""The compiled shapes a VMFB offers, and the nearest one for a batch.

Entries by name: `decode_bsN`, `prefill_bsN` (any S), `prefill_bsN_sS`, `extend_tT`, `extend` (any T).
An `extend` entry whose tokens are `[R, S]` has the padded layout, one whose tokens are `[T]` the packed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shortfin_apps.llm.abi import EntryFamily
from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.runtime.device import EntrySignature
from shortfin_apps.llm.errors import ArtifactError

# Upstream's exporter states 2 as the least block-table width its VMFBs were compiled for.
MIN_BLOCKS = 2
_ROWS_ENTRY = re.compile(r"(prefill|decode)_bs(\d+)(?:_s(\d+))?")
_EXTEND_ENTRY = re.compile(r"extend(?:_t(\d+))?")


class Layout(StrEnum):
    """Which arguments an entry takes, and in which order; see `invocation.py`."""

    DECODE = "decode"
    PREFILL = "prefill"
    PACKED = "packed"


@dataclass(frozen=True, slots=True)
class Shape:
    """One invocation's shape: `rows` tasks, `tokens` in all (rows x S where padded), `blocks` B."""

    entry: str
    layout: Layout
    rows: int
    tokens: int
    blocks: int


class Buckets:
    """`has_position` tells whether prefills take start positions; without them S and B are one symbol."""

    def __init__(self, entries: Mapping[str, EntrySignature], stride: int, *, has_position: bool) -> None:
        self._stride = stride
        self._has_position = has_position
        self._decode: dict[int, str] = {}
        self._prefill: dict[int, str] = {}  # any S
        self._static_prefill: dict[tuple[int, int], str] = {}
        self._extend: dict[int, str] = {}
        self._dynamic_extend: str | None = None
        self._extend_layout = Layout.PACKED
        for name, signature in entries.items():
            self._add_rows_entry(name)
            self._add_extend_entry(name, signature)
        if not self._decode or not (self._prefill or self._static_prefill):
            raise ArtifactError("the VMFB has no prefill_bsN or no decode_bsN entry; rebuild it")

    @property
    def has_extend(self) -> bool:
        """Whether a batch of any size can run on an `extend` entry."""
        return self._dynamic_extend is not None

    @property
    def takes_any_chunk(self) -> bool:
        """Whether a prefill of any length runs unpadded in every number of rows."""
        return all(rows in self._prefill for rows, _ in self._static_prefill)

    def any_decode(self) -> str:
        return self._decode[min(self._decode)]

    def of(self, batch: Batch) -> Shape:
        """The nearest compiled shape that holds the batch."""
        if batch.family is EntryFamily.DECODE:
            return self._decode_shape(batch.tasks)
        if batch.family is EntryFamily.PREFILL:
            return self._prefill_shape(batch.tasks)
        return self._extend_shape(batch.tasks)

    def smallest_shapes(self) -> list[Shape]:
        """The least shape of every entry."""
        stride = self._stride
        shapes = [Shape(name, Layout.DECODE, n, n, MIN_BLOCKS) for n, name in self._decode.items()]
        shapes += [
            Shape(name, Layout.PREFILL, n, n * MIN_BLOCKS * stride, MIN_BLOCKS)
            for n, name in self._prefill.items()
        ]
        shapes += [
            Shape(name, Layout.PREFILL, n, n * length, max(MIN_BLOCKS, length // stride))
            for (n, length), name in self._static_prefill.items()
        ]
        shapes += [Shape(name, self._extend_layout, 1, t, MIN_BLOCKS) for t, name in self._extend.items()]
        if self._dynamic_extend is not None:
            shapes.append(Shape(self._dynamic_extend, self._extend_layout, 1, stride, MIN_BLOCKS))
        return shapes

    def _add_rows_entry(self, name: str) -> None:
        if (match := _ROWS_ENTRY.fullmatch(name)) is None:
            return
        kind, rows, length = match[1], int(match[2]), match[3]
        if kind == "decode":
            self._decode[rows] = name
        elif length is None:
            self._prefill[rows] = name
        else:
            self._static_prefill[rows, int(length)] = name

    def _add_extend_entry(self, name: str, signature: EntrySignature) -> None:
        if (match := _EXTEND_ENTRY.fullmatch(name)) is None:
            return
        if match[1] is not None:
            self._extend[int(match[1])] = name
            return
        self._dynamic_extend = name
        if signature.arguments is not None and len(signature.arguments[0].shape) == 2:
            self._extend_layout = Layout.PREFILL

    def _decode_shape(self, tasks: Sequence[LlmTaskInput]) -> Shape:
        rows = min(n for n in self._decode if n >= len(tasks))
        return Shape(self._decode[rows], Layout.DECODE, rows, rows, _widest(tasks))

    def _prefill_shape(self, tasks: Sequence[LlmTaskInput]) -> Shape:
        length = self._padded_length(tasks)
        entry, rows, length = self._prefill_entry(len(tasks), length)
        return Shape(entry, Layout.PREFILL, rows, rows * length, self._prefill_blocks(tasks, length))

    def _extend_shape(self, tasks: Sequence[LlmTaskInput]) -> Shape:
        assert self._dynamic_extend is not None, "the mode was checked against the VMFB"
        if self._extend_layout is Layout.PREFILL:
            length = self._padded_length(tasks)
            blocks = self._prefill_blocks(tasks, length)
            return Shape(self._dynamic_extend, Layout.PREFILL, len(tasks), len(tasks) * length, blocks)
        total = sum(len(task.input_tokens) for task in tasks)
        bucket = min((t for t in self._extend if t >= total), default=None)
        entry = self._dynamic_extend if bucket is None else self._extend[bucket]
        return Shape(entry, Layout.PACKED, len(tasks), bucket or total, _widest(tasks))

    def _padded_length(self, tasks: Sequence[LlmTaskInput]) -> int:
        pages = max(-(-len(task.input_tokens) // self._stride) for task in tasks)
        return (pages if self._has_position else max(pages, MIN_BLOCKS)) * self._stride

    def _prefill_blocks(self, tasks: Sequence[LlmTaskInput], length: int) -> int:
        """The pages before the latest start, and those of S after it."""
        first = max(task.start_position for task in tasks) // self._stride
        return max(MIN_BLOCKS, first + length // self._stride)

    def _prefill_entry(self, num_rows: int, length: int) -> tuple[str, int, int]:
        all_rows = self._prefill.keys() | {rows for rows, _ in self._static_prefill}
        rows = min(n for n in all_rows if n >= num_rows)
        exact = self._static_prefill.get((rows, length))
        if exact is not None:
            return exact, rows, length
        if rows in self._prefill:
            return self._prefill[rows], rows, length
        nearest = min(s for n, s in self._static_prefill if n == rows and s >= length)
        return self._static_prefill[rows, nearest], rows, nearest


def _widest(tasks: Sequence[LlmTaskInput]) -> int:
    return max(MIN_BLOCKS, *(len(task.page_ids) for task in tasks))
