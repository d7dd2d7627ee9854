"""Retries, headers and concurrency of requests to a server, independent of an HTTP library."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

from shortfin_apps.llm.contract.errors import InvalidRequestError

DEFAULT_URL = "http://127.0.0.1:8000"


def checked_prompt(prompt: str | Sequence[int]) -> str | list[int]:
    """Return the prompt for a request body.

    Raises InvalidRequestError for several prompts, whose answers a caller of one would mix or lose.
    """
    if isinstance(prompt, str):
        return prompt
    if any(isinstance(each, Sequence) for each in prompt):
        raise InvalidRequestError(
            "`prompt` must be one text or the token ids of one; give each prompt on its own", "prompt"
        )
    return list(prompt)


def checked_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None.

    Raises InvalidRequestError for NaN and infinity, as JSON would have null in their place.
    """
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequestError(f"`{name}` must be a finite number, not {value}", name)
    return {name: value for name, value in fields.items() if value is not None}


def parse_retry_after(value: str | None, now_s: float) -> float | None:
    """Convert a `Retry-After` header (RFC 9110, 10.2.3), in seconds or an HTTP date, to seconds from now.

    `now_s` is the Unix time of the answer. Returns None if the header is missing or invalid, and 0 for a
    date in the past.
    """
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
        # The RFC defines a date without a zone as GMT; Python parses it as naive.
        at_s = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
    return max(0.0, at_s - now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with jitter. A delay is at least the server's `Retry-After`.

    A request is not retried if `Retry-After` exceeds `longest_wait_s`. `random` must return floats in [0, 1).
    """

    max_retries: int
    random: Callable[[], float]
    base_s: float = 0.25
    cap_s: float = 8.0
    longest_wait_s: float = 60.0

    def delay_s(self, attempt: int, retry_after_s: float | None = None) -> float | None:
        """Return the delay in seconds before retry number `attempt`, counted from 0; None: do not retry."""
        if attempt >= self.max_retries:
            return None
        backoff_s = min(self.cap_s, self.base_s * 2.0 ** min(attempt, 32))
        if retry_after_s is None:
            return backoff_s * (0.5 + 0.5 * self.random())
        if retry_after_s > self.longest_wait_s:
            return None
        # Jitter, so that clients that got the same `Retry-After` do not all retry at the same time.
        return retry_after_s + backoff_s * self.random()


def bearer(api_key: str | None) -> dict[str, str]:
    """Return the `Authorization` header for a key; without a key, no header.

    Raises InvalidRequestError for a key with characters that a header cannot have.
    """
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise InvalidRequestError("the API key must have printable ASCII characters alone", "api_key")
    return {"Authorization": f"Bearer {api_key}"}


def checked_timeout(timeout_s: float | None) -> float | None:
    """Return `timeout_s` unchanged. Raises InvalidRequestError unless it is positive or None."""
    if timeout_s is not None and not timeout_s > 0:  # also refuses NaN
        raise InvalidRequestError(f"the timeout must be more than 0 seconds, not {timeout_s:g}", "timeout")
    return timeout_s


async def together(work: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
    """Call `work` `count` times and run the coroutines concurrently.

    The first error cancels the other coroutines and is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
