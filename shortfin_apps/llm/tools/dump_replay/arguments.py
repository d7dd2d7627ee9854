"""Validates a dump's arguments, as devices read and write at the indices in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.invocation.batch_runner import BatchResult
from shortfin_apps.llm.components.recorder.dump_file import DumpError
from shortfin_apps.llm.components.recorder.records import Array, Draw, Task
from shortfin_apps.llm.components.sampling.row_edits import words_of
from shortfin_apps.llm.contract.abi import EditField, PenaltyField, SamplingField

_SAMPLE = {"row_indices": "<i8", "positions": "<i8", "sampling": "<i8"}
_ADJUSTED = {"penalties": "<f4", "edits": "<i4", "allowed": "<i4", "allowed_indices": "<i8"}

Values = npt.NDArray[Any]


def check_tokens(task: Task, vocab_size: int | None) -> None:
    """Raise DumpError for tokens outside of the model's vocabulary."""
    if vocab_size is not None and max(task.token_ids) >= vocab_size:
        raise DumpError(f"token {max(task.token_ids)} is not in the model's vocabulary of {vocab_size}")


def draw_arguments(record: Draw, result: BatchResult) -> dict[str, Values]:
    """Return the arguments of a draw from `result`. Raises DumpError."""
    names = _SAMPLE | _ADJUSTED if "edits" in record.arguments else _SAMPLE
    if set(record.arguments) != set(names):
        raise DumpError(f"record {record.number} has other arguments than a draw takes")
    arrays = {name: _array(record, record.arguments[name], dtype) for name, dtype in names.items()}
    rows, vocab_size = result.on_device["logits"].shape[0], result.on_device["logits"].shape[-1]
    num_draws = arrays["positions"].size
    is_valid = (
        arrays["positions"].shape == arrays["row_indices"].shape == (num_draws,)
        and arrays["sampling"].shape == (len(SamplingField), num_draws)
        and _within(arrays["row_indices"], 0, rows)
    )
    if is_valid and "edits" in arrays:
        is_valid = _are_valid_edits(arrays, num_draws, vocab_size)
    if not is_valid or record.num_draws > num_draws:
        raise DumpError(f"record {record.number} draws from rows or tokens that are not there")
    return arrays


def _are_valid_edits(arrays: dict[str, Values], num_draws: int, vocab_size: int) -> bool:
    edits, allowed = arrays["edits"], arrays["allowed"]
    return (
        edits.ndim == 2
        and edits.shape[0] == len(EditField)
        and _within(edits[EditField.ROW], -1, num_draws)
        and _within(edits[EditField.TOKEN_ID][edits[EditField.ROW] >= 0], 0, vocab_size)
        and allowed.ndim == 2
        and allowed.shape[1] == words_of(vocab_size)
        and _within(arrays["allowed_indices"], -1, len(allowed))
        and arrays["penalties"].shape == (len(PenaltyField), num_draws)
        and arrays["allowed_indices"].shape == (num_draws,)
    )


def _within(array: Values, least: int, end: int) -> bool:
    return not array.size or bool(array.min() >= least and array.max() < end)


def _array(record: Draw, array: Array, dtype: str) -> Values:
    try:
        if array.dtype != dtype:
            raise ValueError(f"it is of {array.dtype}")
        return np.frombuffer(array.data, dtype).reshape([int(size) for size in array.shape])
    except ValueError as error:
        raise DumpError(f"record {record.number} has a malformed argument ({error})") from None
