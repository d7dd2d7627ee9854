from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.client.sending import RetryPolicy, parse_retry_after, together

NOON = 784_123_200.0  # Sun, 06 Nov 1994 12:00:00 GMT


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        (" 0 ", 0.0),
        ("Sun, 06 Nov 1994 12:00:30 GMT", 30.0),
        ("Sun, 06 Nov 1994 11:59:00 GMT", 0.0),  # in the past
        ("Sun, 06 Nov 1994 14:00:05 +0200", 5.0),
        ("Sun, 06 Nov 1994 12:00:05", 5.0),  # without a zone: GMT
        ("soon", None),
        ("-3", None),
        ("1.5", None),
        ("Mon, 01 Jan 99999999999999999999 00:00:00 GMT", None),
        ("Sun, 06 Nov 1994 12:00:05 +99999999999999999999", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value, NOON) == seconds


@given(
    attempt=st.integers(0, 200),
    random=st.floats(0, 1, exclude_max=True),
    retry_after_s=st.none() | st.floats(0, 60),
)
def test_a_delay_is_bounded_and_at_least_retry_after(
    attempt: int, random: float, retry_after_s: float | None
) -> None:
    policy = RetryPolicy(max_retries=201, random=lambda: random)
    delay_s = policy.delay_s(attempt, retry_after_s)
    assert delay_s is not None
    assert (retry_after_s or 0) <= delay_s <= (retry_after_s or 0) + policy.cap_s


def test_delays_grow_and_retries_end() -> None:
    policy = RetryPolicy(max_retries=3, random=lambda: 0.0)
    assert [policy.delay_s(n) for n in range(4)] == [0.125, 0.25, 0.5, None]


def test_a_too_long_retry_after_is_not_retried() -> None:
    assert RetryPolicy(max_retries=3, random=lambda: 0.0).delay_s(0, 61.0) is None


async def test_all_run_at_once() -> None:
    barrier = asyncio.Barrier(3)

    async def work() -> None:
        await barrier.wait()

    await together(work, 3)
    await together(work, 0)


async def test_the_first_error_ends_the_others_and_is_raised_unchanged() -> None:
    cancelled, error = 0, KeyError("x")
    waiting = iter([False, False, True])

    async def work() -> None:
        nonlocal cancelled
        if next(waiting):
            raise error
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled += 1
            raise

    with pytest.raises(KeyError) as raised:
        await together(work, 3)
    assert raised.value is error
    assert cancelled == 2
