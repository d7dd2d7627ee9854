"""Arguments of the entries that compute tokens: the tokens and positions of tasks, padded to a shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.invocation.buckets import Shape
from shortfin_apps.llm.components.invocation.loop_state import padded, padding_state
from shortfin_apps.llm.contract.abi import LOOP_LAYOUTS, Layout

Array = npt.NDArray[Any]


def padded_arrays(shape: Shape, tasks: Sequence[LlmTaskInput]) -> dict[str, Array]:
    """Return the tasks' tokens and positions by argument name, padded to the shape."""
    if shape.layout in LOOP_LAYOUTS:
        return padding_state(shape.rows) | (_given(shape, tasks) if tasks else {})
    arrays = {
        "start_positions": padded([task.start_position for task in tasks], shape.rows, 0),
        "seq_lens": padded([task.seq_len for task in tasks], shape.rows, 1),
    }
    if shape.layout is Layout.PACKED:
        arrays["tokens"], arrays["offsets"] = _packed_tokens(shape, tasks)
        arrays["followers"] = _followers(shape, tasks)
    else:
        arrays["tokens"] = _padded_tokens(shape, tasks)
    return arrays


def _given(shape: Shape, tasks: Sequence[LlmTaskInput]) -> dict[str, Array]:
    """Return the arguments of a draft for known tokens."""
    assert shape.layout is Layout.DRAFT, "loop_state.py has the tasks of decode loops"
    return {
        "tokens": padded([task.token_ids[0] for task in tasks], shape.rows, 0),
        "slots": padded([task.request.slot for task in tasks], shape.rows, -1),
        "positions": padded([task.start_position for task in tasks], shape.rows, -1),
    }


def _padded_tokens(shape: Shape, tasks: Sequence[LlmTaskInput]) -> Array:
    tokens = np.zeros((shape.rows, shape.tokens // shape.rows), np.int64)
    for row, task in enumerate(tasks):
        tokens[row, : len(task.token_ids)] = task.token_ids
    return tokens


def _packed_tokens(shape: Shape, tasks: Sequence[LlmTaskInput]) -> tuple[Array, Array]:
    """Return the arguments `tokens[T]` and `offsets[R]` of a packed `extend`."""
    tokens = np.zeros(shape.tokens, np.int64)
    offsets = np.zeros(shape.rows, np.int64)
    ends = list(accumulate(len(task.token_ids) for task in tasks))
    offsets[1 : len(tasks)] = ends[:-1]
    tokens[: ends[-1] if ends else 0] = list(chain.from_iterable(task.token_ids for task in tasks))
    return tokens, offsets


def _followers(shape: Shape, tasks: Sequence[LlmTaskInput]) -> Array:
    """Return the argument `followers[R]`: tasks of one request follow each other."""
    followers, first = np.zeros(shape.rows, np.int64), 0
    for row, (before, task) in enumerate(pairwise(tasks), 1):
        if task.request is before.request:
            followers[row] = -1
            followers[first] += 1
        else:
            first = row
    return followers


def state_pages(tasks: Sequence[LlmTaskInput], stride: int) -> list[tuple[int, int, int]]:
    """Return row, column and page ID of each proposed token's state in the block table of states."""
    return [
        (row, task.start_position // stride, task.state_page_id)
        for row, task in enumerate(tasks)
        if task.state_page_id is not None
    ]
