"""Admission control: limits on queued requests and prompt tokens, with an estimated retry time.

A request's slot is reserved on admission and released when the request has been answered. Its prompt tokens
are released with its first generated token. Only the event loop's thread uses this module, so reservations
are atomic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.contract.errors import OverloadedError

WINDOW = 32  # measurements per rate estimate
MIN_WAIT_S, MAX_WAIT_S = 1.0, 60.0


class Admission:
    """Limits unanswered requests to `max_requests`, and prompt tokens awaiting prefill to `max_queue_tokens`.

    A prompt longer than `max_queue_tokens` is admitted if no other prompt is queued.
    """

    def __init__(self, *, max_requests: int, max_queue_tokens: int, clock: Callable[[], float]) -> None:
        self.max_requests = max_requests
        self.max_queue_tokens = max_queue_tokens
        self._tokens: dict[str, int] = {}  # prompt tokens not yet prefilled, by request id
        self.num_tokens = 0  # sum of `_tokens`
        self._requests_rate = _Rate(clock)
        self._tokens_rate = _Rate(clock)

    @property
    def num_requests(self) -> int:
        """Requests admitted and not yet answered."""
        return len(self._tokens)

    def enter(self, call: GenerateCall) -> None:
        """Reserve a slot. Raises OverloadedError, except for a later step of a beam search."""
        num_tokens = 0 if call.resumes else len(call.prompt_token_ids)
        if not call.resumes:
            self._check(num_tokens)
        self._tokens[call.request_id] = num_tokens
        self.num_tokens += num_tokens

    def prefilled(self, request_id: str) -> None:
        """Release the prompt tokens of a request that has its first token."""
        if num_tokens := self._tokens.get(request_id):
            self._tokens[request_id] = 0
            self.num_tokens -= num_tokens
            self._tokens_rate.add(num_tokens)

    def leave(self, request_id: str) -> None:
        """Release the slot of a request that has been answered."""
        self.num_tokens -= self._tokens.pop(request_id)
        self._requests_rate.add(1)
        if not self._tokens:  # idle time until the next request must not lower the rates
            self._requests_rate.clear()
            self._tokens_rate.clear()

    def _check(self, num_tokens: int) -> None:
        if len(self._tokens) >= self.max_requests:
            message = f"{len(self._tokens)} requests are already queued or running; try again later"
            raise OverloadedError(message, self._requests_rate.seconds_for(1))
        excess = self.num_tokens + num_tokens - self.max_queue_tokens
        if excess > 0 and self.num_tokens > 0:
            raise OverloadedError(
                f"{self.num_tokens} prompt tokens are already queued and {num_tokens} more would be over"
                f" the limit of {self.max_queue_tokens}; try again later",
                self._tokens_rate.seconds_for(excess),
            )


class _Rate:
    """Events per second over the last `WINDOW` measurements."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: deque[tuple[float, int]] = deque(maxlen=WINDOW)

    def add(self, count: int) -> None:
        self._counts.append((self._clock(), count))

    def clear(self) -> None:
        self._counts.clear()

    def seconds_for(self, count: int) -> float:
        """Estimate the time of `count` events, within [MIN_WAIT_S, MAX_WAIT_S]; without data, MIN_WAIT_S."""
        if len(self._counts) < 2:
            return MIN_WAIT_S
        (first_s, first), (last_s, _) = self._counts[0], self._counts[-1]
        counted = sum(number for _, number in self._counts) - first
        return min(max(count * (last_s - first_s) / counted, MIN_WAIT_S), MAX_WAIT_S)
