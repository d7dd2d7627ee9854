"""A request inside the engine, and its lifecycle table.

    WAITING ──> RUNNING ──> FINISHED
       ^           │
       └─ preempt ─┘        (any state but FINISHED may go to FINISHED)

A request holds a lease on pages exactly while it is RUNNING: only `start` takes a lease, and only leaving
RUNNING releases it. A transition that is not in the table raises an error; the engine then ends only that
request.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterator, Sequence
from enum import Enum, StrEnum, auto
from itertools import islice
from typing import Any, overload

from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.kvcache.lease import AvailablePages, Lease
from shortfin_apps.llm.components.request.grammar import NextMask
from shortfin_apps.llm.components.request.messages import ComputedTask, FinishReason, GenerateCall


class State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.FINISHED}),
    State.RUNNING: frozenset({State.WAITING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


class Chooser(Enum):
    """The part of the system that chooses a request's next token.

    DEVICE: the device alone. ADJUSTED: the device, with penalties, biases and bans that the host can pass
    before it knows the previous token. LATE: the device, with bans that depend on the previous token. HOST:
    the host, which reads the row.
    """

    DEVICE = auto()
    ADJUSTED = auto()
    LATE = auto()
    HOST = auto()


class IllegalTransitionError(AssertionError):
    """A transition that is not in the lifecycle table: always a bug. `request` keeps its state."""

    def __init__(self, request: Request, state: State) -> None:
        super().__init__(f"{request.request_id}: {request.state} -> {state}")
        self.request = request


class Request:
    """One prompt being continued.

    `token_ids` is the prompt and the output so far; the cache holds the K/V of the first `num_computed`.
    The tokens known at `start` are prefilled in chunks, except the last one; from position `first_decode` on,
    each token is a decode. So a preempted request needs no special case. Several known tokens may wait for
    decodes: the ones that a grammar forces are appended without a draw.

    Invocations may be in flight: they compute the tokens from `num_computed` to `num_planned`, and draw
    `num_drawing` tokens on the device that are not in `token_ids` yet. Until then, the last of these tokens
    is only in `slot` of the device's token table (abi.py).
    """

    __slots__ = (
        "adjustments",
        "arrival_s",
        "blocked_at",
        "call",
        "chooser",
        "computed",
        "device_fields",
        "end_token_ids",
        "finish_reason",
        "first_decode",
        "in_slot",
        "last_turn",
        "lease",
        "matcher",
        "max_length",
        "needs_terms",
        "next_mask",
        "num_cached",
        "num_computed",
        "num_drawing",
        "num_overtakes",
        "num_planned",
        "output",
        "queue_s",
        "seed",
        "slot",
        "state",
        "token_counts",
        "token_ids",
    )

    def __init__(
        self, call: GenerateCall, arrival_s: float = 0.0, eos_token_ids: frozenset[int] = frozenset()
    ) -> None:
        self.call = call
        self.arrival_s = arrival_s
        self.queue_s = 0.0  # between arrival and its first task
        self.computed: list[ComputedTask] | None = [] if call.is_traced else None  # since the last delta
        self.token_ids: list[int] = list(call.prompt_token_ids)
        self.output = Output(self.token_ids, len(call.prompt_token_ids))
        self.token_counts = TokenCounts(len(call.prompt_token_ids))  # of `token_ids`, updated on use
        stops = call.params.stop_token_ids
        self.end_token_ids = stops if call.params.ignore_eos else stops | eos_token_ids
        # Whether the host reports more of a row than its token, and so needs terms of it (candidates.py).
        self.needs_terms = call.params.logprobs is not None or call.params.chosen_logits
        self.max_length = len(call.prompt_token_ids) + call.params.max_tokens
        self.chooser: Chooser | None = None  # of all further tokens, once known
        self.adjustments: Sequence[Any] | None = None  # a sampler's, of all further rows, once known
        self.device_fields: array[int] | None = None  # by SamplingField, once a sampler has computed them
        self.first_decode = 0
        self.num_computed = 0
        self.num_planned = 0
        self.num_drawing = 0
        self.slot = 0
        self.in_slot: Sequence[int] = (-1,)  # the token ID that stands for the token in `slot` (abi.py)
        self.num_cached = 0  # prompt tokens found in the cache at the first start
        self.num_overtakes = 0  # requests that arrived later and started earlier
        self.blocked_at: AvailablePages | None = None  # pages available when it last failed to start
        self.state = State.WAITING
        self.lease: Lease | None = None
        self.finish_reason: FinishReason | None = None
        self.last_turn = -1  # serial number of its last task, unique among all requests' tasks
        grammar = call.params.output_grammar
        self.matcher = None if grammar is None else grammar.matcher()
        self.next_mask = NextMask()
        self.seed = secrets.randbits(63) if call.params.seed is None else call.params.seed

    @property
    def request_id(self) -> str:
        return self.call.request_id

    @property
    def tenant(self) -> str:
        return self.call.terms.tenant

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.call.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output, including the ones that the device is drawing."""
        return len(self.token_ids) + self.num_drawing

    @property
    def num_unplanned(self) -> int:
        """Tokens that no invocation computes yet; 0 if the device is drawing the last token."""
        num_tokens = len(self.token_ids) + self.num_drawing
        return 0 if self.num_drawing and num_tokens >= self.max_length else num_tokens - self.num_planned

    @property
    def decodes(self) -> bool:
        """Whether the request's next task has a single token, computed by a decode's kernels."""
        return self.num_planned >= self.first_decode

    @property
    def page_ids(self) -> list[int]:
        """The request's row of the block table; owned by the lease."""
        assert self.lease is not None, f"{self.request_id} is {self.state} and has no pages"
        return self.lease.page_ids

    @property
    def window_page_ids(self) -> list[int] | None:
        """The request's row of the window table (sliding-window layers), or None; owned by the lease."""
        assert self.lease is not None, f"{self.request_id} is {self.state} and has no pages"
        return self.lease.window_page_ids

    @property
    def num_pages(self) -> int:
        """Length of the request's row of the block table or window table, whichever is shorter."""
        assert self.lease is not None, f"{self.request_id} is {self.state} and has no pages"
        return self.lease.num_pages

    def suspect_pages(self) -> None:
        """Mark the request's own pages, if any, to be zeroed before another request gets them.

        The pages may hold NaN, and a program may mask values by multiplying them by 0, which keeps NaN. Pages
        are suspect from the invocation that wrote them until a row that attended to them has finite logits.
        """
        if self.lease is not None:
            self.lease.is_suspect = True

    def take_computed(self) -> tuple[ComputedTask, ...]:
        """Remove and return the timings of tasks since the last delta; empty unless the request is traced."""
        if not self.computed:
            return ()
        computed = tuple(self.computed)
        self.computed.clear()
        return computed

    def start(self, lease: Lease, slot: int = 0) -> None:
        self._move(State.RUNNING)
        self.lease = lease
        self.slot, self.in_slot = slot, (-1 - slot,)
        self.num_overtakes, self.blocked_at = 0, None
        self.first_decode = len(self.token_ids) - 1
        self.num_computed = self.num_planned = lease.num_cached_tokens
        if self.num_generated == 0:
            self.num_cached = lease.num_cached_tokens

    def preempt(self, cache: KVCache) -> None:
        """Move the request back to WAITING. Its tokens are kept; their K/V will be recomputed."""
        self._leave(State.WAITING, cache)

    def finish(self, reason: FinishReason, cache: KVCache) -> None:
        self._leave(State.FINISHED, cache)
        self.finish_reason = reason

    def discard(self, cache: KVCache) -> None:
        """End the request from any state, after a bug broke its lifecycle."""
        self.state = State.FINISHED
        self.finish_reason = FinishReason.ERROR
        self._release(cache)

    def _leave(self, state: State, cache: KVCache) -> None:
        self._move(state)
        self._release(cache)

    def _release(self, cache: KVCache) -> None:
        if self.lease is not None:
            cache.release(self.lease)
            self.lease = None
        self.num_computed = self.num_planned = self.num_drawing = 0

    def _move(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(self, state)
        self.state = state


class Output(Sequence[int]):
    """A view of the tokens in `token_ids` after the first `num_prompt`."""

    __slots__ = ("_num_prompt", "_token_ids")

    def __init__(self, token_ids: list[int], num_prompt: int) -> None:
        self._token_ids, self._num_prompt = token_ids, num_prompt

    def __len__(self) -> int:
        return len(self._token_ids) - self._num_prompt

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice) and index.stop is index.step is None and (index.start or 0) >= 0:
            return self._token_ids[self._num_prompt + (index.start or 0) :]  # does not copy the others
        return self._token_ids[self._num_prompt :][index]

    def __iter__(self) -> Iterator[int]:
        return islice(self._token_ids, self._num_prompt, None)


class TokenCounts:
    """Counts of each generated token, updated incrementally as the sequence grows.

    `token_ids` are the distinct tokens of prompt and output, in order of first appearance. `counts` is how
    often each was generated (0 if only the prompt, the first `num_prompt` tokens, contains it). `places` maps
    a token ID to its index in these two arrays of 64-bit integers.
    """

    def __init__(self, num_prompt: int) -> None:
        self.token_ids, self.counts = array("q"), array("q")
        self._num_prompt = num_prompt
        self._num_read = 0
        self.places: dict[int, int] = {}

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Count the new tokens of `token_ids`, which must extend the previous call's `token_ids`."""
        if not self._num_read:
            self._read_prompt(token_ids[: self._num_prompt])
        for position in range(self._num_read, len(token_ids)):
            place = self.places.setdefault(token_ids[position], len(self.places))
            if place == len(self.token_ids):
                self.token_ids.append(token_ids[position])
                self.counts.append(0)
            self.counts[place] += position >= self._num_prompt
        self._num_read = len(token_ids)

    def _read_prompt(self, token_ids: Sequence[int]) -> None:
        """Note the prompt's distinct tokens, with counts of 0."""
        self.token_ids = array("q", dict.fromkeys(token_ids))
        self.counts = array("q", bytes(self.token_ids.itemsize * len(self.token_ids)))
        self.places = {token_id: place for place, token_id in enumerate(self.token_ids)}
        self._num_read = len(token_ids)
