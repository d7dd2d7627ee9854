from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.frontend.metrics import ServerMetrics
from shortfin_apps.llm.components.frontend.text_generation import TextGenerator, with_seed
from shortfin_apps.llm.components.frontend.text_stream import (
    TextDelta,
    TextRequest,
    gather,
    gather_answers,
    merge,
)
from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall, Terms
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.text.tokenizer import LONG_TEXT
from shortfin_apps.llm.errors import InvalidRequestError, InvocationError, OverloadedError
from tests.api.scripted_engine import Script, ScriptedEngine, failing, forever, saying
from tests.components.text.tiny_tokenizers import EOS, byte_level_tokenizer, sentencepiece_tokenizer

TOKENIZER = byte_level_tokenizer()
[EOS_ID] = TOKENIZER.eos_token_ids
MAX_SEQ_LEN = 64


def setup(script: Script) -> tuple[TextGenerator, ScriptedEngine]:
    engine = ScriptedEngine(script)
    metrics = ServerMetrics("m")
    generator = TextGenerator(TOKENIZER, engine, max_seq_len=MAX_SEQ_LEN, max_requests=4, metrics=metrics)
    return generator, engine


def request(
    *, max_tokens: int = 50, min_tokens: int = 0, stop: tuple[str, ...] = (), include_stop: bool = False
) -> TextRequest:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    return TextRequest(request_id="r", prompt_ids=(1,), params=params, stop=stop, include_stop=include_stop)


def beams(num_beams: int = 3, *, include_stop: bool = False, **params: Any) -> TextRequest:
    return TextRequest(
        request_id="b",
        prompt_ids=(1,),
        params=SamplingParams(**{"max_tokens": 4, **params}),
        include_stop=include_stop,
        num_beams=num_beams,
    )


async def whole(script: Script, request: TextRequest) -> TextDelta:
    generator, engine = setup(script)
    [answer] = await gather(await generator.submit([request]))
    assert not engine.live
    return answer


def in_steps(ids: list[int], sizes: list[int]) -> Script:
    """Hands `ids` out, several to a step, and ends with the last one as LENGTH."""

    def script(call: GenerateCall) -> Iterator[Delta]:
        rest = ids
        for size in [*sizes, len(ids)]:
            now, rest = rest[:size], rest[size:]
            done = None if rest else FinishReason.LENGTH
            yield Delta(request_id=call.request_id, token_ids=tuple(now), finish_reason=done)
            if done:
                return

    return script


def script_of(text: str, sizes: list[int]) -> Script:
    return in_steps(TOKENIZER.encode(text), sizes)


@given(
    text=st.text("ab€the ", min_size=1, max_size=30),
    stops=st.lists(st.text("ab€t", min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(1, 4), max_size=30),
)
async def test_text_never_goes_past_a_stop_string(text: str, stops: list[str], sizes: list[int]) -> None:
    answer = await whole(script_of(text, sizes), request(stop=tuple(stops)))
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if ends:
        assert answer.finish_reason is FinishReason.STOP
        assert isinstance(answer.stop_reason, str)
        assert text[: min(ends)] == answer.text + answer.stop_reason
    else:
        assert (answer.text, answer.finish_reason) == (text, FinishReason.LENGTH)
    assert TOKENIZER.decode(answer.token_ids).startswith(answer.text)


async def test_tokens_after_a_stop_string_are_not_reported() -> None:
    ids = TOKENIZER.encode("axb")
    answer = await whole(in_steps(ids, [3]), request(stop=("x",)))
    assert answer.token_ids == tuple(ids[:2])


async def test_min_tokens_hold_for_stop_strings_too() -> None:
    answer = await whole(script_of("xaxb", []), request(stop=("x",), min_tokens=3))
    assert (answer.text, answer.stop_reason) == ("xa", "x")


async def test_the_terminator_is_text_only_when_asked_for() -> None:
    def script(call: GenerateCall) -> Iterator[Delta]:
        ids = tuple(TOKENIZER.encode("ab"))
        reason = FinishReason.STOP
        yield Delta(request_id=call.request_id, token_ids=ids, finish_reason=reason, stop_token_id=ids[-1])

    answer = await whole(script, request())
    assert (answer.text, answer.stop_reason) == ("a", TOKENIZER.encode("b")[0])
    assert len(answer.token_ids) == 2
    assert (await whole(script, request(include_stop=True))).text == "ab"


async def test_end_of_sequence_has_no_text_and_no_stop_reason() -> None:
    answer = await whole(saying(TOKENIZER, "a"), request())
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("a", FinishReason.STOP, None)
    assert answer.token_ids[-1] == EOS_ID
    assert TOKENIZER.decode(answer.token_ids, skip_special_tokens=False) == f"a{EOS}"


async def test_text_after_a_sentencepiece_prompt_keeps_its_first_space(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path)
    prompt_ids, [_, world] = tuple(tokenizer.encode("hello")), tokenizer.encode("world")
    engine = ScriptedEngine(in_steps([world] * 3, [1, 1]))
    generator = TextGenerator(
        tokenizer, engine, max_seq_len=MAX_SEQ_LEN, max_requests=4, metrics=ServerMetrics("m")
    )
    asked = replace(request(), prompt_ids=prompt_ids)
    [answer] = await gather(await generator.submit([asked]))
    assert answer.text == " world world world"
    stopped = replace(asked, stop=(" wor",))
    [answer] = await gather(await generator.submit([stopped]))
    assert (answer.text, answer.stop_reason, len(answer.token_ids)) == ("", " wor", 1)


async def test_beams_after_a_sentencepiece_prompt_keep_their_first_space(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path)
    prompt_ids = tuple(tokenizer.encode("hello"))
    engine = ScriptedEngine(forever(tokenizer, "world"))
    generator = TextGenerator(
        tokenizer, engine, max_seq_len=MAX_SEQ_LEN, max_requests=4, metrics=ServerMetrics("m")
    )
    asked = replace(beams(2), prompt_ids=prompt_ids)
    [answers] = await gather_answers(await generator.submit_whole([asked]))
    texts = [tokenizer.decode([*prompt_ids, *answer.token_ids]) for answer in answers]
    assert ["hello" + answer.text for answer in answers] == texts


async def test_held_text_comes_when_the_request_ends() -> None:
    answer = await whole(script_of("aEN", []), request(stop=("END",)))
    assert answer.text == "aEN"


async def test_closing_a_stream_that_was_never_read_aborts_it() -> None:
    generator, engine = setup(forever(TOKENIZER, "a"))
    [stream] = await generator.submit([request()])
    await stream.aclose()
    await stream.aclose()
    assert len(engine.aborted) == 1


@pytest.mark.parametrize("count", [1, 3])
async def test_leaving_a_merge_early_aborts_all(count: int) -> None:
    generator, engine = setup(forever(TOKENIZER, "a"))
    deltas = merge(await generator.submit([request()] * count))
    await anext(deltas)
    await deltas.aclose()
    assert not engine.live
    assert len(engine.aborted) == count


async def test_a_merge_gives_every_stream_in_order() -> None:
    generator, _ = setup(saying(TOKENIZER, "the end"))
    texts = ["", "", ""]
    async for index, delta in merge(await generator.submit([request()] * 3)):
        texts[index] += delta.text
    assert texts == ["the end"] * 3


async def test_cancelling_a_gather_aborts_all() -> None:
    generator, engine = setup(forever(TOKENIZER, "a"))
    engine.gate.clear()
    task = asyncio.create_task(gather(await generator.submit([request()] * 2)))
    await engine.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine.live


async def test_one_failure_ends_the_whole_gather() -> None:
    failed = failing(InvocationError("broken"))
    running = forever(TOKENIZER, "a")
    generator, engine = setup(lambda call: (failed if len(engine.calls) == 2 else running)(call))
    streams = await generator.submit([request()] * 2)
    with pytest.raises(InvocationError, match="broken"):
        await gather(streams)


async def test_a_stream_that_ends_without_a_reason_is_an_error() -> None:
    with pytest.raises(InvocationError, match="without a reason"):
        await whole(lambda call: iter(()), request())


async def test_admission_is_all_or_nothing() -> None:
    generator, engine = setup(forever(TOKENIZER, "a"))
    engine.capacity = 2
    with pytest.raises(OverloadedError):
        await generator.submit([request()] * 3)
    assert not engine.live
    with pytest.raises(InvalidRequestError, match="never fit"):
        await generator.submit([request()] * 5)


async def test_beams_are_answers_best_first_beside_plain_requests() -> None:
    generator, engine = setup(forever(TOKENIZER, "a"))
    requests = [request(max_tokens=4), beams(3), beams(2)]
    [plain], three, two = await gather_answers(await generator.submit_whole(requests))
    assert plain.text == "aaaa"
    # The script's alternatives to a token are the next ids, each 0.5 below the one before.
    assert [answer.text for answer in three] == ["aaaa", "aaab", "aaba"]
    assert [answer.text for answer in two] == ["aaaa", "aaab"]
    assert {answer.finish_reason for answer in three} == {FinishReason.LENGTH}
    assert not engine.live


@pytest.mark.parametrize(("include_stop", "text"), [(False, ""), (True, "b")])
async def test_a_beam_ends_at_a_stop_token(include_stop: bool, text: str) -> None:
    generator, _ = setup(forever(TOKENIZER, "a"))
    [stop] = TOKENIZER.encode("b")
    asked = beams(2, include_stop=include_stop, stop_token_ids=frozenset([stop]))
    [answers] = await gather_answers(await generator.submit_whole([asked]))
    [stopped] = [answer for answer in answers if answer.finish_reason is FinishReason.STOP][:1]
    assert (stopped.text, stopped.stop_reason, stopped.token_ids) == (text, stop, (stop,))


async def test_a_beam_search_is_one_request_in_the_metrics() -> None:
    generator, _ = setup(forever(TOKENIZER, "a"))
    await gather_answers(await generator.submit_whole([beams(3)]))
    registry, labels = generator._metrics.registry, {"model_name": "m"}
    finished = {**labels, "finished_reason": "length"}
    assert registry.get_sample_value("vllm:request_success_total", finished) == 1
    assert registry.get_sample_value("vllm:request_generation_tokens_sum", labels) == 4
    assert registry.get_sample_value("vllm:time_to_first_token_seconds_count", labels) == 1


async def test_cancelling_a_gather_aborts_beams_too() -> None:
    generator, engine = setup(forever(TOKENIZER, "a"))
    engine.gate.clear()
    task = asyncio.create_task(gather_answers(await generator.submit_whole([beams(3), request()])))
    await engine.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine.live
    registry = generator._metrics.registry
    aborted = {"model_name": "m", "finished_reason": "abort"}
    assert registry.get_sample_value("vllm:request_success_total", aborted) == 2


async def test_beams_that_were_admitted_go_when_others_are_not() -> None:
    generator, engine = setup(forever(TOKENIZER, "a"))
    engine.capacity = 1
    with pytest.raises(OverloadedError):
        await generator.submit_whole([beams(3), beams(3)])
    assert not engine.live


async def test_a_failure_under_beams_is_told() -> None:
    generator, _ = setup(failing(InvocationError("broken")))
    with pytest.raises(InvocationError, match="broken"):
        await gather_answers(await generator.submit_whole([beams(2)]))
    errors = {"model_name": "m", "finished_reason": "error"}
    assert generator._metrics.registry.get_sample_value("vllm:request_success_total", errors) == 1


async def test_requests_with_one_id_are_told_apart() -> None:
    generator, engine = setup(saying(TOKENIZER, "a"))
    await gather(await generator.submit([request()] * 2))
    assert len({call.request_id for call in engine.calls}) == 2


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "default", "fitted"),
    [(10, None, None, 54), (10, None, 16, 16), (60, None, 16, 4), (10, 54, 16, 54), (63, 1, None, 1)],
)
def test_how_many_tokens_fit(
    prompt_len: int, max_tokens: int | None, default: int | None, fitted: int
) -> None:
    generator, _ = setup(saying(TOKENIZER, "a"))
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
def test_what_cannot_fit_is_refused(prompt: list[int], max_tokens: int | None, param: str) -> None:
    generator, _ = setup(saying(TOKENIZER, "a"))
    with pytest.raises(InvalidRequestError) as caught:
        generator.fit(prompt, max_tokens, default=None, param="prompt")
    assert caught.value.param == param


@pytest.mark.parametrize("prompt", [[-1], [10**9], [1] * 65])
def test_a_prompt_that_is_only_echoed_is_checked_too(prompt: list[int]) -> None:
    generator, _ = setup(saying(TOKENIZER, "a"))
    with pytest.raises(InvalidRequestError) as caught:
        generator.check_ids(prompt, "prompt")
    assert caught.value.param == "prompt"
    generator.check_ids([], "prompt")
    generator.check_ids([1] * MAX_SEQ_LEN, "prompt")


async def test_long_texts_are_tokenised_the_same() -> None:
    generator, _ = setup(saying(TOKENIZER, "a"))
    text = "the €" * LONG_TEXT
    assert await generator.encode(text) == tuple(TOKENIZER.encode(text))


async def test_what_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, _ = setup(saying(TOKENIZER, "a"))
    longest = len("<|begin|>")
    fits = "<|begin|>" * MAX_SEQ_LEN
    assert len(await generator.encode(fits, param="prompt")) == MAX_SEQ_LEN
    digits = "7" * (longest * MAX_SEQ_LEN + 1)
    assert len(await generator.encode(digits)) == len(digits)  # without a field it is no prompt
    monkeypatch.setattr(TOKENIZER, "encode", None)
    with pytest.raises(InvalidRequestError, match="577 characters, so at least 65 tokens") as caught:
        await generator.encode(digits, param="prompt")
    assert caught.value.param == "prompt"


def test_the_first_choice_keeps_the_seed() -> None:
    params = SamplingParams(max_tokens=1, seed=2**63 - 1)
    assert with_seed(params, 0) == params
    assert with_seed(params, 1).seed == 0
    assert with_seed(SamplingParams(max_tokens=1), 1).seed is None


@pytest.mark.parametrize(
    ("limit", "wanted", "effective"),
    [(None, None, None), (None, 3.0, 3.0), (5.0, None, 5.0), (5.0, 9.0, 5.0)],
)
async def test_a_request_has_the_shorter_of_its_time_and_the_servers(
    limit: float | None, wanted: float | None, effective: float | None
) -> None:
    engine = ScriptedEngine(saying(TOKENIZER, "a"))
    generator = TextGenerator(
        TOKENIZER,
        engine,
        max_seq_len=MAX_SEQ_LEN,
        max_requests=4,
        metrics=ServerMetrics("m"),
        request_timeout_s=limit,
    )
    asked = replace(request(), terms=Terms(timeout_s=wanted, tenant="t"))
    await gather(await generator.submit([asked]))
    assert engine.calls[0].terms == Terms(timeout_s=effective, tenant="t")


async def test_prompts_longer_together_than_the_queue_can_never_fit() -> None:
    generator, engine = setup(saying(TOKENIZER, "a"))
    engine.queue_tokens = 5
    long = replace(request(), prompt_ids=(1,) * 6)
    with pytest.raises(InvalidRequestError, match="room for 5"):
        await generator.submit([request(), replace(request(), prompt_ids=(1,) * 5)])
    await gather(await generator.submit([long]))  # one alone waits for nobody
    assert not engine.live


async def test_abort_ends_all_of_that_name_and_forgets_them() -> None:
    generator, engine = setup(forever(TOKENIZER, "a"))
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
