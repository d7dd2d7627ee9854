"""Entries over long histories, against the numpy reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.cached_rows import CachedRows
from tests.builder.compiled_model import TINY, CompiledModel

SPEC = replace(TINY, max_position_embeddings=8448)
OPTIONS = BuildOptions(
    context_length=8448, prefill_batch_sizes=(1,), decode_batch_sizes=(1, 8), chunk_sizes=(), top_k=8
)
# Positions in the cache of each row: around 4,096 and 8,192, where the compiler's reductions end a tile.
HISTORIES = (1, 600, 4090, 4096, 4100, 5000, 8190, 8300)
ROWS = range(len(HISTORIES))
NEW = (1, 9, 9, 1, 3, 9, 1, 16)  # tokens that an extend computes of each row
PREFILLED = 20
ROOM = 32
# Keys that make attention choose: with smaller ones a whole tile left out would hardly show.
KEY_SCALE = 3.0
# bf16 K/V, weights and activations, which the reference does not narrow: the largest error was 0.09, on this
# CPU and on emulated GPUs. With the wrong sums of IREE 3.9 it was 4.
TOLERANCE = 0.15

Check = Callable[[CachedRows], None]


def build_long(device: Device, folder: Path, target: Target) -> CompiledModel:
    """The tiny model for a GPU `target`, with room for HISTORIES, loaded on `device`."""
    return CompiledModel.build(SPEC, replace(OPTIONS, device=target.device), device, folder, target)


def long_rows(model: CompiledModel) -> CachedRows:
    """HISTORIES in the model's cache."""
    return CachedRows(model, HISTORIES, ROOM, KEY_SCALE, TOLERANCE)


def check_decode_of_one_row(rows: CachedRows) -> None:
    for row in ROWS:
        rows.decode("decode_bs1", [row])


def check_decode_of_many_rows(rows: CachedRows) -> None:
    rows.decode("decode_bs8", ROWS)


def check_prefill(rows: CachedRows) -> None:
    for row in ROWS:
        rows.prefill("prefill_bs1", [row], [PREFILLED])


def check_extend(rows: CachedRows) -> None:
    rows.extend("extend", ROWS, NEW)


CHECKS: tuple[Check, ...] = (
    check_decode_of_one_row,
    check_decode_of_many_rows,
    check_prefill,
    check_extend,
)
