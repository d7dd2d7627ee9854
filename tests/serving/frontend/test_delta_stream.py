from __future__ import annotations

import asyncio

import pytest

from shortfin_apps.llm.components.request.messages import Delta, FinishReason, TokenLogprobs
from shortfin_apps.llm.serving.frontend.delta_stream import DeltaStream


def delta(*token_ids: int, reason: FinishReason | None = None, cached: int = 0) -> Delta:
    logprobs = tuple(TokenLogprobs(-float(i), (), 1) for i in token_ids)
    return Delta(
        request_id="a",
        token_ids=token_ids,
        logprobs=logprobs,
        num_cached_tokens=cached,
        queue_s=1.5 * bool(token_ids),
        finish_reason=reason,
        stop_token_id=token_ids[-1] if reason else None,
    )


class Closings:
    """Counts the calls of `on_close`."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


async def test_a_prompt_reader_gets_each_delta_unchanged() -> None:
    stream = DeltaStream(Closings())
    for first in (delta(1), delta(2)):
        stream.put(first)
        assert await anext(stream) is first


@pytest.mark.parametrize("taken", [False, True])
async def test_a_late_reader_gets_one_joined_delta(taken: bool) -> None:
    stream = DeltaStream(Closings())
    for one in (delta(1, cached=4), delta(2, 3), delta(4, reason=FinishReason.STOP)):
        stream.put(one)
    assert stream.num_tokens == 4
    joined = stream.take() if taken else await anext(stream)
    assert joined == Delta(
        request_id="a",
        token_ids=(1, 2, 3, 4),
        logprobs=tuple(TokenLogprobs(-float(i), (), 1) for i in (1, 2, 3, 4)),
        num_cached_tokens=4,
        queue_s=1.5,
        finish_reason=FinishReason.STOP,
        stop_token_id=4,
    )
    assert (stream.num_tokens, stream.take()) == (0, None)


async def test_a_reader_waits_for_the_next_delta() -> None:
    stream = DeltaStream(Closings())
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    assert not reading.done()
    stream.put(delta(1))
    assert await reading == delta(1)


async def test_iteration_ends_behind_the_last_delta() -> None:
    stream = DeltaStream(closings := Closings())
    stream.put(last := delta(1, reason=FinishReason.LENGTH))
    assert [each async for each in stream] == [last]
    stream.close()
    assert closings.count == 0  # there is nothing to abort


def test_a_listener_is_told_of_every_delta_in_the_call_that_puts_it() -> None:
    stream, taken = DeltaStream(Closings()), []
    stream.on_delta = lambda: taken.append(stream.take())
    for one in (delta(1), delta(2, reason=FinishReason.STOP)):
        stream.put(one)
        assert taken[-1] is one


def test_a_reader_that_leaves_early_is_told_once_and_gets_nothing_more() -> None:
    stream = DeltaStream(closings := Closings())
    told: list[None] = []
    stream.on_delta = lambda: told.append(None)
    stream.put(delta(1))
    stream.close()
    stream.close()
    stream.put(delta(2, reason=FinishReason.ABORT))
    assert (closings.count, stream.take(), len(told)) == (1, None, 1)
