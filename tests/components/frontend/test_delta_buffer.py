from __future__ import annotations

import asyncio

from shortfin_apps.llm.components.frontend.delta_buffer import DeltaBuffer
from shortfin_apps.llm.components.request.messages import Delta, FinishReason, TokenLogprobs


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


async def test_a_prompt_reader_gets_each_delta_unchanged() -> None:
    buffer = DeltaBuffer()
    for first in (delta(1), delta(2)):
        buffer.put(first)
        assert await buffer.get() is first


async def test_a_late_reader_gets_one_joined_delta() -> None:
    buffer = DeltaBuffer()
    for one in (delta(1, cached=4), delta(2, 3), delta(4, reason=FinishReason.STOP)):
        buffer.put(one)
    assert buffer.num_tokens == 4
    assert await buffer.get() == Delta(
        request_id="a",
        token_ids=(1, 2, 3, 4),
        logprobs=tuple(TokenLogprobs(-float(i), (), 1) for i in (1, 2, 3, 4)),
        num_cached_tokens=4,
        queue_s=1.5,
        finish_reason=FinishReason.STOP,
        stop_token_id=4,
    )
    assert buffer.num_tokens == 0


async def test_a_reader_waits_for_the_next_delta() -> None:
    buffer = DeltaBuffer()
    reading = asyncio.create_task(buffer.get())
    await asyncio.sleep(0)
    assert not reading.done()
    buffer.put(delta(1))
    assert await reading == delta(1)
