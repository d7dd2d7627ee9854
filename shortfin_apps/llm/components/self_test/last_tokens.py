"""Arguments of the entries that read or update a table by slot, `last_tokens` or `counts` (abi.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.invocation.loop_state import padded
from shortfin_apps.llm.contract.abi import NO_TOP_K, NOT_SEEN, EditField, PenaltyField, SamplingField
from shortfin_apps.llm.contract.sampling_rule import UNIT_SCALE

Array = npt.NDArray[Any]

_UNUSED = -7  # in slots without a token
_COUNTED_ROWS = 4  # of an `adjusted_sample`: counts for a slot of each row may take more than 100 MB
_SCALE = int(np.float32(UNIT_SCALE).view(np.int32))


@dataclass(frozen=True, slots=True)
class Table:
    """The tokens `token_ids` of some rows in a table, in reverse order; its first slot is unused."""

    token_ids: Sequence[int]

    @property
    def slots(self) -> Array:
        """The slot of each row."""
        return np.arange(len(self.token_ids), 0, -1)

    @property
    def array(self) -> Array:
        table = np.full(len(self.token_ids) + 1, _UNUSED)
        table[self.slots] = self.token_ids
        return table

    def problem(self, after: Array, drawn: Array) -> str | None:
        """Return what is wrong with the table `after` its rows drew tokens, or None.

        A row without a token (NOT_FINITE) stores nothing.
        """
        expected = self.array
        expected[self.slots[drawn >= 0]] = drawn[drawn >= 0]
        if np.array_equal(after, expected):
            return None
        return "it stores other tokens than it returns, or replaces those of other requests"

    def counts(self, vocab_size: int) -> Array:
        """Return counts [slots, vocab_size] for this table, before its rows drew tokens."""
        return np.full((len(self.token_ids) + 1, vocab_size), _UNUSED, np.int32)

    def counts_problem(self, after: Array, drawn: Array) -> str | None:
        """Return what is wrong with the counts `after` its rows reset them and drew tokens, or None."""
        expected = self.counts(after.shape[1])
        expected[self.slots] = NOT_SEEN
        expected[self.slots[drawn >= 0], drawn[drawn >= 0]] = 1
        if np.array_equal(after, expected):
            return None
        return "it counts other tokens than it returns, or changes the counts of other requests"


def packed_arguments(tasks: Sequence[LlmTaskInput], length: int, num_followers: int = 0) -> dict[str, Array]:
    """Return the arguments of a packed `extend` of `length` tokens; each last token is in the table.

    `num_followers` tasks after the first one continue its sequence.
    """
    table = Table([task.token_ids[-1] for task in tasks])
    ends = np.cumsum([len(task.token_ids) for task in tasks])
    tokens = np.zeros(length, np.int64)
    tokens[: ends[-1]] = np.concatenate([task.token_ids for task in tasks])
    tokens[ends - 1] = -1 - table.slots
    followers = np.zeros(len(tasks), np.int64)
    followers[:1], followers[1 : 1 + num_followers] = num_followers, -1
    return {
        "tokens": tokens,
        "offsets": np.concatenate([[0], ends[:-1]]),
        "start_positions": np.array([task.start_position for task in tasks]),
        "seq_lens": np.array([task.seq_len for task in tasks]),
        "followers": followers,
        "last_tokens": table.array,
    }


def loop_arguments(tasks: Sequence[LlmTaskInput], rows: int) -> tuple[Table, dict[str, Array]]:
    """Return a table with the tokens of the tasks, decodes, and the arguments of a greedy decode loop."""
    table = Table([task.token_ids[-1] for task in tasks])
    tokens = padded(-1 - table.slots, rows, 0)
    return table, {"tokens": tokens, **_draws(table, tasks, rows, [1] * len(tasks))}


def sample_arguments(
    tasks: Sequence[LlmTaskInput], row_indices: Sequence[int]
) -> tuple[Table, dict[str, Array]]:
    """Return a table and the arguments of `sample`, except logits and candidates.

    The entry draws the best tokens of these rows, in turn from a full row and with a top-k. `tasks` are the
    rows' tasks.
    """
    rows = len(row_indices)
    table = Table([_UNUSED] * rows)
    top_ks = [(NO_TOP_K, 1)[row % 2] for row in range(rows)]
    return table, {
        **_draws(table, tasks, rows, top_ks),
        "row_indices": np.array(row_indices),
    }


def adjusted_arguments(
    tasks: Sequence[LlmTaskInput], row_indices: Sequence[int], vocab_size: int
) -> tuple[Table, dict[str, Array]]:
    """Return a table and the arguments of `adjusted_sample`, except logits, like `sample_arguments`.

    No row is adjusted. The first rows reset the counts of their slots; the others have no slot.
    """
    rows = len(row_indices)
    table = Table([_UNUSED] * min(rows, _COUNTED_ROWS))
    _, drawn = sample_arguments(tasks, row_indices)
    return table, {
        **drawn,
        "slots": padded(table.slots, rows, -1),
        "penalties": np.zeros((len(PenaltyField), rows), np.float32),
        "edits": np.full((len(EditField), 1), -1, np.int32),
        "allowed": np.zeros((1, -(-vocab_size // 32)), np.int32),
        "allowed_indices": np.full(rows, -1),
        "resets": np.ones(rows, np.int64),
        "last_tokens": table.array,
        "counts": table.counts(vocab_size),
    }


def logprob_arguments(token_ids: Sequence[int], row_indices: Sequence[int]) -> tuple[Table, dict[str, Array]]:
    """Return a table with the tokens of these rows, and the arguments of `logprobs` that name the rows."""
    table = Table(token_ids)
    arrays = {"row_indices": np.array(row_indices), "slots": table.slots, "last_tokens": table.array}
    return table, arrays


def _draws(table: Table, tasks: Sequence[LlmTaskInput], rows: int, top_ks: Sequence[int]) -> dict[str, Array]:
    fields = [_best(task, top_k) for task, top_k in zip(tasks, top_ks, strict=True)]
    columns = np.zeros((len(SamplingField), rows), np.int64)
    for field in SamplingField:
        columns[field, : len(fields)] = [each[field] for each in fields]
    return {
        "slots": padded(table.slots, rows, -1),
        "positions": padded([task.seq_len - 1 for task in tasks], rows, -1),
        "sampling": columns,
        "last_tokens": table.array,
    }


def _best(task: LlmTaskInput, top_k: int) -> Mapping[SamplingField, int]:
    """Return the sampling fields of a draw of the best token.

    Top-p is so small that only the best token passes.
    """
    return {
        SamplingField.SCALE: _SCALE,
        SamplingField.TOP_K: top_k,
        SamplingField.SHARE: 1,
        SamplingField.LEAST_WEIGHT: 0,
        SamplingField.SEED: task.request.seed,
        SamplingField.PROMPT_LENGTH: task.seq_len,
    }
