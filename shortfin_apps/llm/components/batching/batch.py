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


@dataclass(slots=True, eq=False)  # not frozen: that would triple the time to create one
class LlmTaskInput:
    """The tokens of one request that one invocation computes.

    `token_ids` are at positions `start_position` to `seq_len - 1` of the sequence; `seq_len` includes all
    earlier tokens. `page_ids` is the request's full block table, `window_page_ids` the one of sliding-window
    layers. Both are the lease's own lists: callers must read their contents only during the step, and may
    only compare their identity afterwards.

    A token that the device has yet to draw is represented by -1 minus the request's slot (abi.py).
    `completes`: the last row yields a token, because the task ends at the request's last or at a proposed
    token. `num_ahead` counts the tokens, up to the end of this task, that are only proposed.
    """

    request: Request
    token_ids: Sequence[int]
    start_position: int
    seq_len: int
    page_ids: Sequence[int]
    window_page_ids: Sequence[int] | None = None
    completes: bool = True
    num_ahead: int = 0

    @classmethod
    def next_of(cls, request: Request, max_tokens: int) -> LlmTaskInput:
        """Create a task of the request's next `max_tokens` unplanned tokens, or all if there are fewer."""
        start = request.num_planned
        tokens = request.token_ids[start : start + max_tokens] or [-1 - request.slot]
        end = start + len(tokens)
        tables = request.page_ids, request.window_page_ids
        return cls(request, tokens, start, end, *tables, completes=end >= request.num_tokens)

    def following(self) -> LlmTaskInput:
        """Create the task of the token that this one, which must complete, yields."""
        request, start = self.request, self.seq_len
        tokens = request.token_ids[start : start + 1] or (-1 - request.slot,)
        return LlmTaskInput(request, tokens, start, start + 1, self.page_ids, self.window_page_ids)

    @classmethod
    def proposed(cls, last: LlmTaskInput, offset: int, token_id: int) -> LlmTaskInput:
        """Create a task for a proposed token, `offset` positions after the token of the decode `last`."""
        start = last.start_position + offset
        tables = last.page_ids, last.window_page_ids
        return cls(last.request, (token_id,), start, start + 1, *tables, num_ahead=offset)

    @property
    def has_left(self) -> bool:
        """Whether the request has ended, or given up its pages, since the task was planned."""
        return self.request.lease is None or self.request.lease.page_ids is not self.page_ids

    @property
    def is_rejected(self) -> bool:
        """Whether the task's proposed token is not the one that the rows before it yielded."""
        request, start = self.request, self.start_position
        return request.num_computed != start or request.token_ids[start] != self.token_ids[0]

    @property
    def is_unknown(self) -> bool:
        """Whether the host does not know the task's token yet."""
        return self.token_ids[0] < 0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tasks of one invocation, and the family of the entry that runs them.

    Each request has one task, and one more for each proposed token. Tasks of proposed tokens come last, and
    tasks of one request are in order of position.
    """

    family: EntryFamily
    tasks: tuple[LlmTaskInput, ...]

    @property
    def is_decode(self) -> bool:
        """Whether each task is the last known, or the next, token of another request."""
        return self.family is not EntryFamily.PREFILL and all(
            len(task.token_ids) == 1 and task.completes and not task.num_ahead for task in self.tasks
        )

    def following(self) -> Batch:
        """Create the batch of the tokens that the rows of this one, which must be decodes, will yield."""
        return Batch(self.family, tuple([task.following() for task in self.tasks]))
