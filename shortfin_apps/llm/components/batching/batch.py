"""What one invocation computes: tasks of several requests, frozen when the step is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shortfin_apps.llm.abi import EntryFamily
from shortfin_apps.llm.components.request.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class LlmTaskInput:
    """The part of one request that one invocation computes.

    `input_tokens` stand at absolute positions `start_position .. seq_len - 1`; `seq_len` is
    cumulative. `page_ids` is the request's whole block table, the lease's own list: it is read while
    the step runs, and kept for its identity alone.
    """

    request: Request
    input_tokens: Sequence[int]
    start_position: int
    seq_len: int
    page_ids: Sequence[int]

    @property
    def completes(self) -> bool:
        """Whether this task computes the request's last known token, and so yields the next one."""
        return self.seq_len == len(self.request.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    family: EntryFamily
    tasks: tuple[LlmTaskInput, ...]
