"""One invocation's work: tasks of several requests, fixed when the step is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.abi import EntryFamily


class Paged(Protocol):
    """A task or a running request, with the block table that its lease owns."""

    @property
    def page_ids(self) -> Sequence[int]: ...

    @property
    def window_page_ids(self) -> Sequence[int] | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class LlmTaskInput:
    """The part of one request that one invocation computes.

    `token_ids` are at absolute positions `start_position .. seq_len - 1`; `seq_len` is cumulative. `page_ids`
    is the request's full block table, the lease's own list: its content is read only during the step;
    afterwards only its identity is compared. The same holds for `window_page_ids`, the block table of
    sliding-window layers.
    """

    request: Request
    token_ids: Sequence[int]
    start_position: int
    seq_len: int
    page_ids: Sequence[int]
    window_page_ids: Sequence[int] | None = None

    @classmethod
    def next_of(cls, request: Request, max_tokens: int) -> LlmTaskInput:
        """The request's next `max_tokens` tokens, or all uncomputed tokens if there are fewer."""
        start = request.num_computed
        tokens = request.token_ids[start : start + max_tokens]
        table, window_table = request.page_ids, request.window_page_ids
        return cls(request, tokens, start, start + len(tokens), table, window_table)

    @classmethod
    def proposed(cls, last: LlmTaskInput, offset: int, token_id: int) -> LlmTaskInput:
        """A proposed token, `offset` positions after the token of `last`, a decode."""
        start = last.start_position + offset
        return cls(last.request, (token_id,), start, start + 1, last.page_ids, last.window_page_ids)

    @property
    def num_ahead(self) -> int:
        """Number of tokens up to this task's last that are only proposed, not part of the request yet."""
        return max(0, self.seq_len - len(self.request.token_ids))

    @property
    def completes(self) -> bool:
        """Whether its last row yields a token: it computes the last known token or a proposed one."""
        return self.seq_len >= len(self.request.token_ids)

    @property
    def is_stale(self) -> bool:
        """Whether another token was chosen in place of the proposed one, or the request has already ended.

        The number of computed tokens of an ended request is 0.
        """
        request, start = self.request, self.start_position
        return request.num_computed != start or request.token_ids[start] != self.token_ids[0]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tasks of one invocation, and the family of entries they run on.

    Each task is of a different request, except for proposed tokens. These come last, in order within each
    request.
    """

    family: EntryFamily
    tasks: tuple[LlmTaskInput, ...]
