"""The tasks of one invocation, fixed when the step is planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.abi import EntryFamily


@dataclass(slots=True, eq=False)  # not frozen: that would triple the time to create one
class LlmTaskInput:
    """The tokens of one request that one invocation computes.

    `token_ids` are at positions `start_position` to `seq_len - 1` of the sequence; `seq_len` includes all
    earlier tokens. `page_ids` is the request's full block table, `window_page_ids` the one of sliding-window
    layers. Both are the lease's own lists: callers must read their contents only during the step, and may
    only compare their identity afterwards.

    A token that the device has yet to draw is represented by -1 minus its place in the device's table: the
    request's slot, or another one for a drafted token (abi.py).
    `completes`: the last row yields a token, because the task ends at the request's last or at a proposed
    token. `num_ahead` counts the tokens, up to the end of this task, that are only proposed. `state_page_id`:
    the page for the state after a proposed token, if the model keeps states (lease.py).

    `on_launch`, `skip_draw` and `on_commit` keep the request's counts of planned, computed and drawn tokens.
    """

    request: Request
    token_ids: Sequence[int]
    start_position: int
    seq_len: int
    page_ids: Sequence[int]
    window_page_ids: Sequence[int] | None = None
    completes: bool = True
    num_ahead: int = 0
    state_page_id: int | None = None

    @classmethod
    def next_of(cls, request: Request, max_tokens: int, offset: int = 0) -> LlmTaskInput:
        """Create a task of the request's next `max_tokens` unplanned tokens, or all if there are fewer.

        The first `offset` unplanned tokens are left out: other tasks of the batch compute them.
        """
        lease, start = request.lease, request.num_planned + offset
        assert lease is not None, "only running requests have tasks"
        tokens = request.token_ids[start : start + max_tokens] or request.in_slot
        end = start + len(tokens)
        completes = end >= len(request.token_ids) + request.num_drawing
        return cls(request, tokens, start, end, lease.page_ids, lease.window_page_ids, completes)

    def following(self) -> LlmTaskInput:
        """Create the task of the token that this one, which must complete, yields."""
        request, start = self.request, self.seq_len
        tokens = request.token_ids[start : start + 1] or request.in_slot
        return LlmTaskInput(request, tokens, start, start + 1, self.page_ids, self.window_page_ids)

    @classmethod
    def proposed(
        cls, last: LlmTaskInput, offset: int, token_id: int, state_page_id: int | None = None
    ) -> LlmTaskInput:
        """Create a task for a proposed token, `offset` positions after the token of the decode `last`."""
        start = last.start_position + offset
        task = cls(last.request, [token_id], start, start + 1, last.page_ids, last.window_page_ids)
        task.num_ahead, task.state_page_id = offset, state_page_id
        return task

    def learn(self, token_id: int | None) -> None:
        """Set the token of a proposed task that the device has drawn; None: none, and the row yields nothing.

        The list of tokens stays the same, because a record of the batch may have it.
        """
        assert isinstance(self.token_ids, list), "it is proposed"
        self.token_ids[0] = -1 if token_id is None else token_id
        self.completes = token_id is not None

    def on_launch(self, turn: int) -> None:
        """Count the task's tokens as planned; if it completes, the device draws the token after them.

        `turn` is the task's serial number.
        """
        request = self.request
        request.last_turn = turn
        if not self.num_ahead:
            request.num_planned = self.seq_len
            request.num_drawing += self.completes

    def skip_draw(self) -> None:
        """Yield no token, because the token after this launched task has become known."""
        self.completes = False
        self.request.num_drawing -= 1

    def on_commit(self) -> bool:
        """Count the task's tokens as computed, and the token that it yields, if any, as drawn.

        Returns whether the last row yields a token that is not known yet.
        """
        request = self.request
        request.num_computed = self.seq_len
        if self.num_ahead:
            request.num_planned = self.seq_len
        else:
            request.num_drawing -= self.completes
        return self.completes and self.seq_len >= len(request.token_ids)

    @property
    def is_followed(self) -> bool:
        """Whether the request's token after the task is known: no row needs to yield it."""
        return self.seq_len < len(self.request.token_ids)

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

    Each request has one task, or one decode for each of several known tokens, and one more for each proposed
    token (`has_proposals`). Tasks of one request follow each other, in order of position.

    `series` is the same object for a batch and the ones that `following` makes of it. `learn` waits for
    proposed tokens that the device has yet to draw, and puts them into the tasks; None if all are known.
    """

    family: EntryFamily
    tasks: tuple[LlmTaskInput, ...]
    series: object = field(default_factory=object)
    has_proposals: bool = False
    learn: Callable[[], None] | None = None

    @property
    def is_decode(self) -> bool:
        """Whether each task is the last known, or the next, token of another request."""
        return self.family is not EntryFamily.PREFILL and all(
            len(task.token_ids) == 1 and task.completes and not task.num_ahead for task in self.tasks
        )

    def following(self) -> Batch:
        """Create the batch of the tokens that the rows of this one, which must be decodes, will yield."""
        return Batch(self.family, tuple([task.following() for task in self.tasks]), self.series)


def decode_tasks(requests: Sequence[Request], max_rows: int) -> list[LlmTaskInput]:
    """Create the decodes of these requests: one token each, and further known tokens up to `max_rows` tasks.

    Known tokens after the first are tasks of their own, because a decode's kernels compute one token per row.
    Only a packed `extend` takes several rows of one request; other callers must set `max_rows` to the number
    of requests.
    """
    tasks: list[LlmTaskInput] = []
    more_rows = max(0, max_rows - len(requests))
    for request in requests:
        tasks.append(first := LlmTaskInput.next_of(request, 1))
        if not first.completes:
            count = min(request.num_unplanned - 1, more_rows)
            more_rows -= count
            tasks += [LlmTaskInput.next_of(request, 1, 1 + offset) for offset in range(count)]
    return tasks
