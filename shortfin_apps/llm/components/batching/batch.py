"""The tasks of one invocation, fixed when the step is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.abi import EntryFamily


class Paged(Protocol):
    """A task or running request, with its block tables; the request's lease owns these lists."""

    @property
    def page_ids(self) -> Sequence[int]: ...

    @property
    def window_page_ids(self) -> Sequence[int] | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class LlmTaskInput:
    """The tokens of one request that one invocation computes.

    `token_ids` are at positions `start_position` to `seq_len - 1` of the sequence; `seq_len` includes all
    earlier tokens. `page_ids` is the request's full block table, `window_page_ids` the one of sliding-window
    layers. Both are the lease's own lists: callers must read their contents only during the step, and may
    only compare their identity afterwards.
    """

    request: Request
    token_ids: Sequence[int]
    start_position: int
    seq_len: int
    page_ids: Sequence[int]
    window_page_ids: Sequence[int] | None = None

    @classmethod
    def next_of(cls, request: Request, max_tokens: int) -> LlmTaskInput:
        """Create a task of the request's next `max_tokens` uncomputed tokens, or all if there are fewer."""
        start = request.num_computed
        tokens = request.token_ids[start : start + max_tokens]
        table, window_table = request.page_ids, request.window_page_ids
        return cls(request, tokens, start, start + len(tokens), table, window_table)

    @classmethod
    def proposed(cls, last: LlmTaskInput, offset: int, token_id: int) -> LlmTaskInput:
        """Create a task for a proposed token, `offset` positions after the token of the decode `last`."""
        start = last.start_position + offset
        return cls(last.request, (token_id,), start, start + 1, last.page_ids, last.window_page_ids)

    @property
    def num_ahead(self) -> int:
        """Number of tokens, up to the end of this task, that are only proposed and not yet in the request."""
        return max(0, self.seq_len - len(self.request.token_ids))

    @property
    def completes(self) -> bool:
        """Whether the last row yields a token: the task ends at the request's last or at a proposed token."""
        return self.seq_len >= len(self.request.token_ids)

    @property
    def is_stale(self) -> bool:
        """Whether the task's result must be dropped: its proposed token was rejected, or the request ended.

        An ended request has `num_computed` 0.
        """
        request, start = self.request, self.start_position
        return request.num_computed != start or request.token_ids[start] != self.token_ids[0]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tasks of one invocation, and the family of the entry that runs them.

    Each request has one task, and one more for each proposed token. Tasks of proposed tokens come last, and
    tasks of one request are in order of position.
    """

    family: EntryFamily
    tasks: tuple[LlmTaskInput, ...]
