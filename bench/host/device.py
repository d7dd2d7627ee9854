"""A device that computes nothing: its tokens come from a table, after a configurable time.

A row with a bitmask of allowed tokens gets one of these, which costs the caller `drawing_s`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shortfin_apps.llm.components.runtime.declaration import MLIR_DTYPES
from shortfin_apps.llm.components.runtime.device import Array, DeviceBuffer, EntrySignature, TensorType
from shortfin_apps.llm.contract.abi import (
    ARGUMENT_TYPES,
    Entry,
    EntryFamily,
    Layout,
    TermField,
    argument_names,
)
from shortfin_apps.llm.contract.config import ModelConfig, PagedKVCacheConfig

F32, I64 = np.dtype(np.float32), np.dtype(np.int64)
STRIDE, MAX_SEQ_LEN, TOP_K = 32, 2048, 8
EXTEND_TOKENS = 1024
HEAD_DIM = 128  # modes derive the cost of a long context from it
SLAB_ELEMENTS = 2 * STRIDE * HEAD_DIM  # never touched, so they take no memory
_SEED, _TABLE_STEPS = 7, 64
# The first tokens of a byte-level vocabulary: parts of characters, which produce no text.
_NUM_BYTES = 256
# Ends of strings, objects and numbers of JSON, one of which is drawn every few tokens where one is allowed.
_ENDS = b'"},'
_TOKENS_PER_END = 128
_WORD_OCTETS = 4


@dataclass(slots=True)
class HostBuffer:
    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype


@dataclass(frozen=True, slots=True)
class IdlePending:
    """An invocation that ends at `ready_s` (`perf_counter`); the caller owns its results."""

    ready_s: float

    def results(self) -> Sequence[DeviceBuffer]:
        return ()

    def wait(self) -> Sequence[DeviceBuffer]:
        if (left_s := self.ready_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        return ()


class IdleProgram:
    """Entries with results owned by the caller, as on GPUs; invocations run one after the other."""

    def __init__(self, rows: int, vocab_size: int, step_s: float) -> None:
        random = np.random.default_rng(_SEED)
        self._token_ids = random.integers(_NUM_BYTES, vocab_size, (_TABLE_STEPS, max(rows, TOP_K)))
        self._step_s = step_s
        self._num_steps = 0
        self._ready_s = 0.0
        self.drawing_s = 0.0
        one = (
            TensorType((rows, 1, TOP_K), F32),
            TensorType((rows, 1, TOP_K), I64),
            TensorType((rows, 1, vocab_size), F32),
        )
        results = {
            Entry(EntryFamily.PREFILL, rows, None): one,
            Entry(EntryFamily.DECODE, rows, 1): one,
            Entry(EntryFamily.DECODE_LOOP, rows, 1): (TensorType((rows,), I64), *one),
            Entry(EntryFamily.EXTEND, None, None): one,
            Entry(EntryFamily.EXTEND, None, EXTEND_TOKENS): one,
            Entry(EntryFamily.SAMPLE, rows, None): (TensorType((rows,), I64),),
            Entry(EntryFamily.ADJUSTED_SAMPLE, rows, None): (TensorType((rows,), I64),),
            Entry(EntryFamily.LOGPROBS, rows, None): (
                TensorType((len(TermField), rows), I64),
                TensorType((rows, TOP_K), F32),
                TensorType((rows, TOP_K), I64),
            ),
        }
        self.entries: Mapping[str, EntrySignature] = {
            entry.name: EntrySignature(entry.name, _arguments(entry, vocab_size), types, workspace_bytes=1)
            for entry, types in results.items()
        }

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> IdlePending:
        num_results = len(self.entries[entry].results or ())
        token_ids = arguments[-1 - num_results]  # the first result, or values; a workspace is last
        assert isinstance(token_ids, HostBuffer)
        self._num_steps += 1
        row = self._token_ids[self._num_steps % _TABLE_STEPS]
        token_ids.array[...] = row[: token_ids.shape[-1]]
        family = entry.partition("_bs")[0]
        if family == EntryFamily.LOGPROBS:
            token_ids.array[TermField.MASS] = 1  # the first result: terms
        elif family == EntryFamily.ADJUSTED_SAMPLE:
            self._draw_allowed(arguments, token_ids.array)
        self._ready_s = max(self._ready_s, time.perf_counter()) + self._step_s
        return IdlePending(self._ready_s)

    def _draw_allowed(self, arguments: Sequence[DeviceBuffer], token_ids: Array) -> None:
        """Replace the tokens of rows that have a bitmask by allowed ones."""
        began_s = time.process_time()
        names = argument_names(Layout.ADJUSTED_SAMPLE)
        of_name = dict(zip(names, arguments, strict=False))
        allowed, indices = of_name["allowed"], of_name["allowed_indices"]
        assert isinstance(allowed, HostBuffer)
        assert isinstance(indices, HostBuffer)
        octets = allowed.array.view(np.uint8)
        if octets.shape[1] == _WORD_OCTETS:  # a warm-up, which knows no vocabulary
            return
        for row in np.flatnonzero(indices.array >= 0).tolist():
            token_ids[row] = self._allowed_near(octets[indices.array[row]], int(token_ids[row]), row)
        self.drawing_s += time.process_time() - began_s

    def _allowed_near(self, octets: Array, token_id: int, row: int) -> int:
        if (self._num_steps + row) % _TOKENS_PER_END == 0:
            for end in _ENDS:
                if octets[end // 8] >> end % 8 & 1:
                    return end
        octet = token_id // 8
        octet += int((octets[octet:] != 0).argmax())
        if not octets[octet]:
            octet = int((octets != 0).argmax())
        known = int(octets[octet])
        return octet * 8 + (known & -known).bit_length() - 1


def _arguments(entry: Entry, vocab_size: int) -> tuple[TensorType, ...] | None:
    """Return the types of arguments if the engine reads them: of an `extend`, and of counts of tokens."""
    if entry.family is EntryFamily.ADJUSTED_SAMPLE:
        of_rows = entry.argument_shapes() | {"counts": (None, vocab_size)}
        dtypes = {name: MLIR_DTYPES[ARGUMENT_TYPES.get(name, "i64")] for name in of_rows}
        return tuple(TensorType(shape, dtypes[name]) for name, shape in of_rows.items())
    if entry.family is not EntryFamily.EXTEND:
        return None
    shapes = entry.argument_shapes(tokens_rank=1).values()
    return *(TensorType(shape, I64) for shape in shapes), TensorType((None, SLAB_ELEMENTS), F32)


class IdleDevice:
    """Holds one program of `rows` rows; an invocation takes `step_s` and no CPU time."""

    name = "idle"

    def __init__(self, rows: int, vocab_size: int, step_s: float = 0.0) -> None:
        self._program = IdleProgram(rows, vocab_size, step_s)

    def load_program(self, vmfb: Path, parameters: Sequence[Path], module_name: str) -> IdleProgram:
        return self._program

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        stage: int = 0,
        only_dispatches: bool = False,
        on_host: bool = False,
    ) -> HostBuffer:
        return HostBuffer(np.zeros(shape, dtype))

    @property
    def drawing_s(self) -> float:
        """CPU time spent on choosing allowed tokens."""
        return self._program.drawing_s

    def spare_bytes(self, stage: int = 0) -> int | None:
        return None

    def upload(self, array: Array) -> HostBuffer:
        return HostBuffer(array.copy())

    def download(self, buffer: DeviceBuffer) -> Array:
        assert isinstance(buffer, HostBuffer)
        return buffer.array

    def clear(self, buffer: DeviceBuffer, rows: Sequence[int]) -> None:
        return None

    def close(self) -> None:
        return None


def model_config(rows: int) -> ModelConfig:
    """Return the config of a model with enough pages for `rows` requests of the maximum length."""
    return ModelConfig(
        max_seq_len=MAX_SEQ_LEN,
        transformer_block_count=1,
        attn_head_dim=HEAD_DIM,
        prefill_batch_sizes=(rows,),
        decode_batch_sizes=(rows,),
        has_prefill_position=True,
        top_k=TOP_K,
        paged_kv_cache=PagedKVCacheConfig(
            attention_head_count_kv=1,
            block_seq_stride=STRIDE,
            device_block_count=2 + rows * (MAX_SEQ_LEN // STRIDE),
            kv_cache_dtype="float32",
            paged_kv_block_size_elements_per_device=(SLAB_ELEMENTS,),
        ),
    )
