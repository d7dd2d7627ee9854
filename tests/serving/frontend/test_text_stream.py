from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall
from shortfin_apps.llm.contract.errors import InvocationError, LlmError
from shortfin_apps.llm.serving.frontend.delta_stream import DeltaStream
from shortfin_apps.llm.serving.frontend.text_stream import (
    TextDelta,
    TextRequest,
    TextStream,
    gather,
    gather_answers,
)
from tests.serving.api.scripted_engine import Script, ScriptedEngine, failing, forever, saying
from tests.serving.frontend.text_requests import TOKENIZER, beams, make_generator, request
from tests.serving.text.tiny_tokenizers import EOS, sentencepiece_tokenizer

[EOS_ID] = TOKENIZER.eos_token_ids


async def answer_to(script: Script, request: TextRequest) -> TextDelta:
    generator, engine = make_generator(script)
    [answer] = await gather(await generator.submit([request]))
    assert not engine.live
    return answer


def in_steps(ids: list[int], sizes: list[int]) -> Script:
    """Generates `ids`, `sizes` of them per step, and ends with LENGTH."""

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
    answer = await answer_to(script_of(text, sizes), request(stop=tuple(stops)))
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
    answer = await answer_to(in_steps(ids, [3]), request(stop=("x",)))
    assert answer.token_ids == tuple(ids[:2])


async def test_min_tokens_apply_to_stop_strings() -> None:
    answer = await answer_to(script_of("xaxb", []), request(stop=("x",), min_tokens=3))
    assert (answer.text, answer.stop_reason) == ("xa", "x")


async def test_a_stop_tokens_text_is_included_on_request() -> None:
    def script(call: GenerateCall) -> Iterator[Delta]:
        ids = tuple(TOKENIZER.encode("ab"))
        reason = FinishReason.STOP
        yield Delta(request_id=call.request_id, token_ids=ids, finish_reason=reason, stop_token_id=ids[-1])

    answer = await answer_to(script, request())
    assert (answer.text, answer.stop_reason) == ("a", TOKENIZER.encode("b")[0])
    assert len(answer.token_ids) == 2
    assert (await answer_to(script, request(include_stop=True))).text == "ab"


async def test_end_of_sequence_has_no_text_and_no_stop_reason() -> None:
    answer = await answer_to(saying(TOKENIZER, "a"), request())
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("a", FinishReason.STOP, None)
    assert answer.token_ids[-1] == EOS_ID
    assert TOKENIZER.decode(answer.token_ids, skip_special_tokens=False) == f"a{EOS}"


async def test_text_after_a_sentencepiece_prompt_keeps_its_first_space(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path)
    prompt_token_ids, [_, world] = tuple(tokenizer.encode("hello")), tokenizer.encode("world")
    generator, _ = make_generator(in_steps([world] * 3, [1, 1]), tokenizer)
    text_request = replace(request(), prompt_token_ids=prompt_token_ids)
    [answer] = await gather(await generator.submit([text_request]))
    assert answer.text == " world world world"
    stopped = replace(text_request, stop=(" wor",))
    [answer] = await gather(await generator.submit([stopped]))
    assert (answer.text, answer.stop_reason, len(answer.token_ids)) == ("", " wor", 1)


async def test_beams_after_a_sentencepiece_prompt_keep_their_first_space(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path)
    prompt_token_ids = tuple(tokenizer.encode("hello"))
    generator, _ = make_generator(forever(tokenizer, "world"), tokenizer)
    text_request = replace(beams(2), prompt_token_ids=prompt_token_ids)
    [answers] = await gather_answers(await generator.submit_whole([text_request]))
    texts = [tokenizer.decode([*prompt_token_ids, *answer.token_ids]) for answer in answers]
    assert ["hello" + answer.text for answer in answers] == texts


async def test_held_text_is_returned_at_the_end() -> None:
    answer = await answer_to(script_of("aEN", []), request(stop=("END",)))
    assert answer.text == "aEN"


async def test_closing_an_unread_stream_aborts_it() -> None:
    generator, engine = make_generator(forever(TOKENIZER, "a"))
    [stream] = await generator.submit([request()])
    stream.close()
    stream.close()
    assert len(engine.aborted) == 1


async def listened(stream: TextStream) -> list[TextDelta]:
    """All deltas of a stream, taken when it says that there are some."""
    deltas: list[TextDelta] = []
    ended = asyncio.get_running_loop().create_future()

    def take() -> None:
        try:
            if (delta := stream.take()) is not None:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    ended.set_result(None)
        except LlmError as error:
            ended.set_exception(error)

    stream.listen(take)
    await ended
    return deltas


async def test_a_listener_takes_the_text_step_by_step() -> None:
    generator, engine = make_generator(script_of("the end", [2, 1]))
    [stream] = await generator.submit([request()])
    deltas = await listened(stream)
    assert [len(delta.token_ids) for delta in deltas] == [2, 1, 2]
    assert "".join(delta.text for delta in deltas) == "the end"
    assert stream.take() is None
    assert not engine.live


async def test_a_listener_takes_the_error() -> None:
    generator, _ = make_generator(failing(InvocationError("broken"), after=TOKENIZER.encode("a")))
    [stream] = await generator.submit([request()])
    with pytest.raises(InvocationError, match="broken"):
        await listened(stream)
    assert stream.take() is None


async def test_a_listener_that_finds_a_stop_string_ends_the_request() -> None:
    generator, engine = make_generator(forever(TOKENIZER, "abx"))
    [stream] = await generator.submit([request(stop=("x",))])
    deltas = await listened(stream)
    assert "".join(delta.text for delta in deltas) == "ab"
    assert len(engine.aborted) == 1
    assert not engine.live


async def test_cancelling_a_gather_aborts_all_streams() -> None:
    generator, engine = make_generator(forever(TOKENIZER, "a"))
    engine.gate.clear()
    task = asyncio.create_task(gather(await generator.submit([request()] * 2)))
    await engine.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine.live


async def test_an_error_that_arrives_after_a_cancellation_harms_no_other_stream() -> None:
    deltas = DeltaStream(lambda: None)

    class Stepped(ScriptedEngine):
        async def submit(self, call: GenerateCall) -> DeltaStream:
            return deltas

    generator, _ = make_generator(forever(TOKENIZER, "a"))
    generator.engine = Stepped(forever(TOKENIZER, "a"))
    [stream] = await generator.submit([request()])
    task = asyncio.create_task(stream.answers())
    await asyncio.sleep(0)
    task.cancel()
    error = InvocationError("broken")
    deltas.put(Delta(request_id="a", finish_reason=FinishReason.ERROR, error=error))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_one_failure_ends_a_gather() -> None:
    failed = failing(InvocationError("broken"))
    running = forever(TOKENIZER, "a")
    generator, engine = make_generator(lambda call: (failed if len(engine.calls) == 2 else running)(call))
    streams = await generator.submit([request()] * 2)
    with pytest.raises(InvocationError, match="broken"):
        await gather(streams)


async def test_beams_are_answers_best_first() -> None:
    generator, engine = make_generator(forever(TOKENIZER, "a"))
    requests = [request(max_tokens=4), beams(3), beams(2)]
    [plain], three, two = await gather_answers(await generator.submit_whole(requests))
    assert plain.text == "aaaa"
    # The script's alternatives to a token are the following ids, each 0.5 less likely than the one before.
    assert [answer.text for answer in three] == ["aaaa", "aaab", "aaba"]
    assert [answer.text for answer in two] == ["aaaa", "aaab"]
    assert {answer.finish_reason for answer in three} == {FinishReason.LENGTH}
    assert not engine.live


@pytest.mark.parametrize(("include_stop", "text"), [(False, ""), (True, "b")])
async def test_a_beam_ends_at_a_stop_token(include_stop: bool, text: str) -> None:
    generator, _ = make_generator(forever(TOKENIZER, "a"))
    [stop] = TOKENIZER.encode("b")
    text_request = beams(2, include_stop=include_stop, stop_token_ids=frozenset([stop]))
    [answers] = await gather_answers(await generator.submit_whole([text_request]))
    [stopped] = [answer for answer in answers if answer.finish_reason is FinishReason.STOP][:1]
    assert (stopped.text, stopped.stop_reason, stopped.token_ids) == (text, stop, (stop,))


async def test_a_beam_search_is_one_request_in_the_metrics() -> None:
    generator, _ = make_generator(forever(TOKENIZER, "a"))
    await gather_answers(await generator.submit_whole([beams(3)]))
    registry, labels = generator._metrics.registry, {"model_name": "m"}
    finished = {**labels, "finished_reason": "length"}
    assert registry.get_sample_value("vllm:request_success_total", finished) == 1
    assert registry.get_sample_value("vllm:request_generation_tokens_sum", labels) == 4
    assert registry.get_sample_value("vllm:time_to_first_token_seconds_count", labels) == 1


async def test_cancelling_a_gather_aborts_beam_searches() -> None:
    generator, engine = make_generator(forever(TOKENIZER, "a"))
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


async def test_a_failed_beam_search_raises() -> None:
    generator, _ = make_generator(failing(InvocationError("broken")))
    with pytest.raises(InvocationError, match="broken"):
        await gather_answers(await generator.submit_whole([beams(2)]))
    errors = {"model_name": "m", "finished_reason": "error"}
    assert generator._metrics.registry.get_sample_value("vllm:request_success_total", errors) == 1
