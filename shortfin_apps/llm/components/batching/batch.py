"""One invocation's work: tasks of several requests, fixed when the step is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shortfin_apps.llm.abi import EntryFamily
from shortfin_apps.llm.components.request.request import Request


class Paged(Protocol):
    """A task or a running request: it has a block table, the lease's own list."""

    @property
    def page_ids(self) -> Sequence[int]: ...

    @property
    def window_page_ids(self) -> Sequence[int] | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class LlmTaskInput:
    """The part of one request that one invocation computes.

    `token_ids` are at absolute positions `start_position .. seq_len - 1`; `seq_len` is
    cumulative. `page_ids` is the request's whole block table, the lease's own list: its content is
    read only while the step runs, later only its identity is compared. So is `window_page_ids`, that of
    layers with windows.
    """

    request: Request
    token_ids: Sequence[int]
    start_position: int
    seq_len: int
    page_ids: Sequence[int]
    window_page_ids: Sequence[int] | None = None

    @classmethod
    def next_of(cls, request: Request, max_tokens: int) -> LlmTaskInput:
        """The request's next `max_tokens` tokens, or as many as are left to compute."""
        start = request.num_computed
        tokens = request.token_ids[start : start + max_tokens]
        table, window_table = request.page_ids, request.window_page_ids
        return cls(request, tokens, start, start + len(tokens), table, window_table)

    @classmethod
    def proposed(cls, last: LlmTaskInput, offset: int, token_id: int) -> LlmTaskInput:
        """A token that may turn out to stand `offset` tokens behind that of `last`, a decode."""
        start = last.start_position + offset
        return cls(last.request, (token_id,), start, start + 1, last.page_ids, last.window_page_ids)

    @property
    def num_ahead(self) -> int:
        """Tokens up to the last of this task that the request does not have, as they are only proposed."""
        return max(0, self.seq_len - len(self.request.token_ids))

    @property
    def completes(self) -> bool:
        """Whether this task computes the request's last known token, or one behind it, and so yields one."""
        return self.seq_len >= len(self.request.token_ids)

    @property
    def is_stale(self) -> bool:
        """Whether its token was proposed and another was chosen, or the request has ended before it.

        An ended request has computed nothing.
        """
        request, start = self.request, self.start_position
        return request.num_computed != start or request.token_ids[start] != self.token_ids[0]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tasks of one invocation, and the family of entries they run on.

    Each is of another request, but for proposed tokens, which follow all others, each behind its request's.
    """

    family: EntryFamily
    tasks: tuple[LlmTaskInput, ...]
