from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from shortfin_apps.llm.components.request.messages import FinishReason, Terms
from shortfin_apps.llm.contract.errors import InvalidRequestError, OverloadedError
from shortfin_apps.llm.serving.frontend.text_stream import (
    gather,
)
from shortfin_apps.llm.serving.text.conversations import NOTHING, Conversations, Recalled
from shortfin_apps.llm.serving.text.tokenizer import LONG_TEXT
from tests.serving.api.scripted_engine import forever, saying
from tests.serving.frontend.text_requests import MAX_SEQ_LEN, TOKENIZER, beams, make_generator, request


async def test_admission_is_all_or_nothing() -> None:
    generator, engine = make_generator(forever(TOKENIZER, "a"))
    engine.capacity = 2
    with pytest.raises(OverloadedError):
        await generator.submit([request()] * 3)
    assert not engine.live
    with pytest.raises(InvalidRequestError, match="never fit"):
        await generator.submit([request()] * 5)


async def test_admitted_beam_searches_are_aborted_if_others_are_not_admitted() -> None:
    generator, engine = make_generator(forever(TOKENIZER, "a"))
    engine.capacity = 1
    with pytest.raises(OverloadedError):
        await generator.submit_whole([beams(3), beams(3)])
    assert not engine.live


async def test_requests_with_the_same_id_have_different_engine_ids() -> None:
    generator, engine = make_generator(saying(TOKENIZER, "a"))
    await gather(await generator.submit([request()] * 2))
    assert len({call.request_id for call in engine.calls}) == 2


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "default", "fitted"),
    [(10, None, None, 54), (10, None, 16, 16), (60, None, 16, 4), (10, 54, 16, 54), (63, 1, None, 1)],
)
def test_fit_returns_the_number_of_tokens_to_generate(
    prompt_len: int, max_tokens: int | None, default: int | None, fitted: int
) -> None:
    generator, _ = make_generator(saying(TOKENIZER, "a"))
    assert generator.fit([1] * prompt_len, max_tokens, default=default, param="prompt") == fitted


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [
        ([], None, "prompt"),
        ([-1], None, "prompt"),
        ([10**9], 1, "prompt"),
        ([1] * 64, None, "prompt"),
        ([1] * 60, 5, "max_tokens"),
    ],
)
def test_fit_refuses_invalid_prompts_and_lengths(
    prompt: list[int], max_tokens: int | None, param: str
) -> None:
    generator, _ = make_generator(saying(TOKENIZER, "a"))
    with pytest.raises(InvalidRequestError) as caught:
        generator.fit(prompt, max_tokens, default=None, param="prompt")
    assert caught.value.param == param


@pytest.mark.parametrize("prompt", [[-1], [10**9], [1] * 65])
def test_an_echoed_prompt_is_checked(prompt: list[int]) -> None:
    generator, _ = make_generator(saying(TOKENIZER, "a"))
    with pytest.raises(InvalidRequestError) as caught:
        generator.check_ids(prompt, "prompt")
    assert caught.value.param == "prompt"
    generator.check_ids([], "prompt")
    generator.check_ids([1] * MAX_SEQ_LEN, "prompt")


async def test_long_texts_have_the_same_tokens() -> None:
    generator, _ = make_generator(saying(TOKENIZER, "a"))
    text = "the €" * LONG_TEXT
    assert await generator.encode(text) == tuple(TOKENIZER.encode(text))


@pytest.mark.parametrize(("num_chars", "thread"), [(LONG_TEXT - 1, "MainThread"), (LONG_TEXT, "text")])
async def test_long_conversations_are_recalled_outside_of_the_event_loop(
    num_chars: int, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def recall(*_: object) -> Recalled:
        threads.append(threading.current_thread().name.partition("_")[0])
        return NOTHING

    monkeypatch.setattr(Conversations, "recall", recall)
    generator, _ = make_generator(saying(TOKENIZER, "a"))
    text = ("<|begin|>" * num_chars)[:num_chars]
    generator.max_seq_len = num_chars
    assert await generator.encode_conversation(text, None, "messages")
    assert threads == [thread]


async def test_a_too_long_text_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, _ = make_generator(saying(TOKENIZER, "a"))
    longest = len("<|begin|>")
    fits = "<|begin|>" * MAX_SEQ_LEN
    assert len(await generator.encode(fits, param="prompt")) == MAX_SEQ_LEN
    digits = "7" * (longest * MAX_SEQ_LEN + 1)
    assert len(await generator.encode(digits)) == len(digits)  # not a prompt without `param`
    monkeypatch.setattr(TOKENIZER, "encode", None)
    with pytest.raises(InvalidRequestError, match="577 characters, so at least 65 tokens") as caught:
        await generator.encode(digits, param="prompt")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("limit", "wanted", "effective"),
    [(None, None, None), (None, 3.0, 3.0), (5.0, None, 5.0), (5.0, 9.0, 5.0)],
)
async def test_the_shorter_of_the_requests_and_the_servers_timeout_applies(
    limit: float | None, wanted: float | None, effective: float | None
) -> None:
    generator, engine = make_generator(saying(TOKENIZER, "a"), request_timeout_s=limit)
    text_request = replace(request(), terms=Terms(timeout_s=wanted, tenant="t"))
    await gather(await generator.submit([text_request]))
    assert engine.calls[0].terms == Terms(timeout_s=effective, tenant="t")


async def test_prompts_larger_than_the_queue_are_refused() -> None:
    generator, engine = make_generator(saying(TOKENIZER, "a"))
    engine.queue_tokens = 5
    long = replace(request(), prompt_token_ids=(1,) * 6)
    with pytest.raises(InvalidRequestError, match="room for 5"):
        await generator.submit([request(), replace(request(), prompt_token_ids=(1,) * 5)])
    await gather(await generator.submit([long]))  # a single longer prompt is admitted
    assert not engine.live


async def test_abort_ends_and_forgets_all_requests_with_the_id() -> None:
    generator, engine = make_generator(forever(TOKENIZER, "a"))
    engine.gate.clear()
    streams = await generator.submit([request(), replace(request(), request_id="other"), request()])
    answers = asyncio.create_task(gather(streams))
    await asyncio.sleep(0)
    assert generator.abort("r", tenant="somebody else") == 0
    assert generator.abort("r", tenant="") == 2
    assert len(engine.live) == 1
    engine.gate.set()
    reasons = [answer.finish_reason for answer in await answers]
    assert reasons == [FinishReason.ABORT, FinishReason.LENGTH, FinishReason.ABORT]
    assert generator.abort("r") == 0
    assert not generator._pending
