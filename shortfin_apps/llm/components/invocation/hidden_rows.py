"""Rows of the table of hidden states that an invocation reads and writes (abi.py).

A request's row for a position depends only on its slot and the position, so nothing has to be remembered:
the row of the token before a task was written by an earlier invocation of the same lease, unless the task is
the first of its lease. More rows are kept per slot than tokens are proposed at once, from whatever source, so
rejected tokens leave the row of the last accepted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.contract.abi import HIDDEN_PER_SLOT, NO_HIDDEN, hidden_row

_FOLLOWS = -1  # the row before it in the batch


def hidden_rows(tasks: Sequence[LlmTaskInput], rows: int) -> dict[str, npt.NDArray[Any]]:
    """Return the arguments `hidden_from` and `hidden_to` for these tasks, padded to `rows`."""
    ends = {task.request: task.seq_len for task in tasks}  # of the last task of each request
    sources, targets = [], []
    before = None
    for task in tasks:
        follows = task.request is before
        sources.append(_FOLLOWS if follows else _row_before(task))
        is_kept = ends[task.request] - task.seq_len < HIDDEN_PER_SLOT
        targets.append(hidden_row(task.request.slot, task.seq_len - 1) if is_kept else NO_HIDDEN)
        before = task.request
    found = {"hidden_from": sources, "hidden_to": targets}
    return {
        name: np.array(each + [NO_HIDDEN] * (rows - len(tasks)), np.int64) for name, each in found.items()
    }


def _row_before(task: LlmTaskInput) -> int:
    """Return the row of the token before the task's first one; NO_HIDDEN for the first task of a lease."""
    return NO_HIDDEN if is_first(task) else hidden_row(task.request.slot, task.start_position - 1)


def is_first(task: LlmTaskInput) -> bool:
    """Return whether the task is the first of its lease: no invocation left the hidden state before it."""
    lease = task.request.lease
    return lease is None or task.start_position <= lease.num_cached_tokens
