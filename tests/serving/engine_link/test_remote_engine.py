from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from llguidance import LLMatcher, LLTokenizer

from shortfin_apps.llm.components.grammar.compiled import CompiledGrammar
from shortfin_apps.llm.components.grammar.source import ANY_OBJECT, GrammarSource
from shortfin_apps.llm.components.recorder.dump_file import read_dump
from shortfin_apps.llm.components.recorder.dumps import Dumps
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder
from shortfin_apps.llm.components.recorder.records import Header
from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.components.request.messages import FinishReason, Terms
from shortfin_apps.llm.contract.errors import (
    InvalidRequestError,
    InvocationError,
    LlmError,
    OverloadedError,
    RequestAbortedError,
    UnavailableError,
)
from shortfin_apps.llm.serving.engine_link.api_links import CHECKS_PER_SIGN, ApiLinks
from shortfin_apps.llm.serving.engine_link.messages import (
    AbortAll,
    AbortRequests,
    Command,
    ReadMetrics,
    SetLogLevel,
)
from shortfin_apps.llm.serving.engine_link.remote_engine import (
    MAX_SILENCE_S,
    SILENT,
    RemoteEngine,
    wait_for_engine,
)
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from shortfin_apps.llm.serving.frontend.beam_search import BeamSearch
from shortfin_apps.llm.serving.frontend.delta_stream import DeltaStream
from tests.components.device_gate import Gate
from tests.components.engine_fixture import call, make_rig
from tests.components.fake_device import greedy_continuation
from tests.components.grammar.test_compiled import compiled
from tests.components.stepped_engine import SteppedClock
from tests.serving.engine_link.linked import Linked, NoGrammars, counts_nothing, linked
from tests.serving.frontend.beam_reference import reference_search
from tests.serving.frontend.test_beam_search import (
    NO_EOS,
    PROMPT,
    assert_same,
    logits,
    search_to_end,
)

PATIENCE_S = 30.0

pytestmark = pytest.mark.timeout(60)


async def tokens_of(stream: DeltaStream) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


async def reason_of(stream: DeltaStream) -> FinishReason | None:
    return [delta.finish_reason async for delta in stream][-1]


async def test_tokens_are_those_of_the_engine_from_every_process() -> None:
    async with linked(make_rig()) as each:
        remotes = [(await each.api_process())[0] for _ in range(3)]
        streams = [
            await remote.submit(call(f"{number}/{i}", PROMPT[i:], max_tokens=9))
            for number, remote in enumerate(remotes)
            for i in range(4)
        ]
        expected = [greedy_continuation(PROMPT[i:], 9) for _ in remotes for i in range(4)]
        assert [await tokens_of(stream) for stream in streams] == expected
        assert len({remote.number for remote in remotes}) == 3


async def test_beams_are_found_over_the_border() -> None:
    async with linked(make_rig(), max_requests=1) as each:
        remote, _ = await each.api_process()
        search = BeamSearch(remote, call("a", PROMPT, max_tokens=9), 4, NO_EOS)
        await search.start()
        assert_same(await search_to_end(search), reference_search(logits, PROMPT, 4, 9))


async def test_a_full_queue_is_told_when_to_come_back() -> None:
    rig = make_rig()
    gate = Gate(rig)
    async with linked(rig, max_requests=1) as each:
        one, _ = await each.api_process()
        other, _ = await each.api_process()
        stream = await one.submit(call("a", PROMPT))
        with pytest.raises(OverloadedError) as caught:
            await other.submit(call("b", PROMPT))
        assert caught.value.retry_after_s >= 1
        gate.open()
        assert await tokens_of(stream) == greedy_continuation(PROMPT, 4)
        assert await tokens_of(await other.submit(call("b", PROMPT))) == greedy_continuation(PROMPT, 4)


async def test_a_wrong_request_names_its_field_and_keeps_no_place() -> None:
    async with linked(make_rig()) as each:
        remote, _ = await each.api_process()
        with pytest.raises(InvalidRequestError) as caught:
            await remote.submit(call("a", PROMPT, max_tokens=10_000))
        assert caught.value.param == "max_tokens"
        assert not remote.abort("a")
        with pytest.raises(OverflowError):  # it cannot be encoded
            await remote.submit(call("a", PROMPT, top_k=10**30))
        assert not remote.abort("a")


async def test_a_grammar_that_cannot_be_compiled_beside_the_engine_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when the reason is a bug, lest the request wait forever."""
    asked: list[tuple[str, str]] = []

    async def fail(_: NoGrammars, source: GrammarSource, param: str, tenant: str) -> Grammar:
        asked.append((param, tenant))
        raise RuntimeError("a bug") if len(asked) == 1 else InvalidRequestError("wrong", param)

    monkeypatch.setattr(NoGrammars, "compile_tried", fail)
    grammar = compiled("a").named("guided_regex")
    async with linked(make_rig()) as each:
        remote, _ = await each.api_process()
        for name, message in (("a", "the engine failed"), ("b", "wrong")):
            bound = call(name, PROMPT, output_grammar=grammar, terms=Terms(tenant="t"))
            with pytest.raises(LlmError, match=message):
                await remote.submit(bound)
    assert asked == [("guided_regex", "t")] * 2


async def test_an_id_that_another_process_uses_is_refused() -> None:
    rig = make_rig()
    gate = Gate(rig)
    async with linked(rig) as each:
        one, _ = await each.api_process()
        other, _ = await each.api_process()
        stream = await one.submit(call("a", PROMPT))
        for remote in (one, other):
            with pytest.raises(InvalidRequestError, match="in use"):
                await remote.submit(call("a", PROMPT))
        gate.open()
        assert await tokens_of(stream) == greedy_continuation(PROMPT, 4)


async def test_what_resumes_and_is_refused_ends_its_stream_with_the_error() -> None:
    async with linked(make_rig()) as each:
        remote, _ = await each.api_process()
        await each.engine.drain(0)
        each.engine._draining._is_over = True
        stream = await remote.submit(replace(call("a", PROMPT), resumes=True))
        [delta] = [delta async for delta in stream]
        assert isinstance(delta.error, RequestAbortedError)


async def test_an_abort_ends_the_stream_with_its_reason() -> None:
    rig = make_rig()
    gate = Gate(rig)
    async with linked(rig) as each:
        remote, _ = await each.api_process()
        stream = await remote.submit(call("a", PROMPT, max_tokens=40))
        assert remote.abort("a", RequestAbortedError("too slow"))
        later = await remote.submit(call("b", PROMPT, max_tokens=1))  # read after the abort
        gate.open()
        deltas = [delta async for delta in stream]
        assert [delta.finish_reason async for delta in later] == [FinishReason.LENGTH]
        assert deltas[-1].finish_reason is FinishReason.ABORT
        assert str(deltas[-1].error) == "too slow"
        assert not remote.abort("a")


async def test_closing_a_stream_frees_its_pages() -> None:
    async with linked(make_rig()) as each:
        remote, _ = await each.api_process()
        stream = await remote.submit(call("a", PROMPT, max_tokens=40))
        await anext(stream)
        stream.close()
        await remote.drain(60)
        assert each.engine.stats().pages.leased == 0


async def test_a_cancelled_submission_leaves_nothing_behind() -> None:
    async with linked(make_rig()) as each:
        remote, _ = await each.api_process()
        submitting = asyncio.create_task(remote.submit(call("a", PROMPT, max_tokens=40)))
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        await remote.drain(60)
        assert await tokens_of(await (await each.api_process())[0].submit(call("a", PROMPT)))


async def test_a_failed_invocation_arrives() -> None:
    rig = make_rig()
    rig.program.faults.spoil = lambda row: True
    async with linked(rig) as each:
        remote, _ = await each.api_process()
        deltas = [delta async for delta in await remote.submit(call("a", PROMPT))]
        assert deltas[-1].finish_reason is FinishReason.ERROR
        assert isinstance(deltas[-1].error, InvocationError)


async def test_a_dead_api_process_loses_its_own_requests_alone() -> None:
    rig = make_rig()
    gate = Gate(rig)
    async with linked(rig) as each:
        dying, link = await each.api_process()
        living, _ = await each.api_process()
        await dying.submit(call("lost", PROMPT, max_tokens=40))
        kept = await living.submit(call("kept", PROMPT, max_tokens=9))
        await dying.close()
        await link.lost.wait()
        gate.open()
        assert await tokens_of(kept) == greedy_continuation(PROMPT, 9)
        await each.engine.drain(60)
        assert each.engine.stats().generation_tokens < 9 + 40, "nobody reads the lost one's tokens"
        assert each.engine.stats().pages.leased == 0


async def test_every_request_is_answered_when_the_engine_is_gone() -> None:
    rig = make_rig()
    gate = Gate(rig)
    lost = asyncio.Event()
    async with linked(rig) as each:
        remote, link = await each.api_process(on_lost=lost.set)
        stream = await remote.submit(call("a", PROMPT, max_tokens=40))
        asking = asyncio.create_task(remote.ask(ReadMetrics()))
        submitting = asyncio.create_task(remote.submit(call("b", PROMPT)))
        await asyncio.sleep(0)
        link._connection.close()
        await lost.wait()
        deltas = [delta async for delta in stream]
        assert isinstance(deltas[-1].error, UnavailableError)
        for task in (asking, submitting):
            with pytest.raises(UnavailableError):
                await task
        with pytest.raises(UnavailableError):
            await remote.submit(call("c", PROMPT))
        assert not remote.healthy
        assert not remote.ready
        gate.open()


async def test_draining_one_process_leaves_the_others_alone() -> None:
    async with linked(make_rig()) as each:
        one, _ = await each.api_process()
        other, _ = await each.api_process()
        stream = await one.submit(call("a", PROMPT, max_tokens=9))
        draining = asyncio.create_task(one.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError):
            await one.submit(call("b", PROMPT))
        assert not one.ready
        assert other.ready
        assert await tokens_of(stream) == greedy_continuation(PROMPT, 9)
        await draining
        assert await tokens_of(await other.submit(call("c", PROMPT))) == greedy_continuation(PROMPT, 4)


async def test_the_engines_state_is_passed_on() -> None:
    async with linked(make_rig()) as each:
        remote, _ = await each.api_process()
        assert remote.ready
        each.engine._draining.begin()
        while remote.ready:
            await asyncio.sleep(0.01)
        assert remote.healthy


async def test_a_process_whose_engine_falls_silent_says_so() -> None:
    """A driver's call may keep the engine's process from running; that it is well is old news then."""
    clock = SteppedClock()
    async with linked(make_rig()) as each:
        remote, _ = await each.api_process(clock=clock)
        clock.now_s += 2 * MAX_SILENCE_S
        assert remote.healthy, "the other processes may not be ready yet"
        while remote._heard_s != clock.now_s:
            await asyncio.sleep(0.01)
        each.links.close()
        clock.now_s += MAX_SILENCE_S
        assert remote.healthy
        clock.now_s += 1.0
        assert remote.problem == SILENT
        each.links._num_checks = CHECKS_PER_SIGN - 1
        each.links._watch()
        while not remote.healthy:
            await asyncio.sleep(0.01)


async def test_why_an_engine_is_not_healthy_is_passed_on() -> None:
    async with linked(make_rig()) as each:
        remote, _ = await each.api_process()
        each.engine._stalls._timeout_s = -1.0  # as if every turn took too long
        while remote.healthy:
            await asyncio.sleep(0.01)
        assert remote.problem == each.engine.problem


async def test_no_process_is_ready_before_all_of_them_serve() -> None:
    rig = make_rig()
    engine, links = AsyncEngine(rig.engine, max_requests=8), ApiLinks()
    engine.start()
    pairs = [socket.socketpair() for _ in range(2)]
    opened = [await links.open(ours) for ours, _ in pairs]
    serving = asyncio.create_task(links.serve(engine, NoGrammars()))
    welcomes = [asyncio.to_thread(wait_for_engine, theirs) for _, theirs in pairs]
    remotes = [
        RemoteEngine(theirs, welcome, execute=counts_nothing)
        for (_, theirs), welcome in zip(pairs, await asyncio.gather(*welcomes), strict=True)
    ]
    remotes[0].start()
    await opened[0].serving.wait()
    assert not serving.done()
    assert not remotes[0].ready
    remotes[1].start()
    await serving
    while not all(remote.ready for remote in remotes):
        await asyncio.sleep(0.01)
    await Linked(engine, links, list(zip(remotes, opened, strict=True))).close()


async def test_commands_are_carried_out_everywhere_and_their_counts_are_summed() -> None:
    heard: list[tuple[int, Command]] = []

    def execute(number: int, command: Command) -> Sequence[float]:
        heard.append((number, command))
        return [] if isinstance(command, SetLogLevel) else [number, 1.0]

    async with linked(make_rig()) as each:
        one, _ = await each.api_process(lambda command: execute(1, command))
        other, _ = await each.api_process(lambda command: execute(2, command))
        assert await one.ask(AbortRequests(("a",), "tenant")) == [3, 2]
        assert await other.ask(AbortAll()) == [3, 2]
        assert await other.ask(SetLogLevel("WARNING")) == []
        assert {number for number, _ in heard} == {1, 2}
        assert heard.count((1, AbortRequests(("a",), "tenant"))) == 1


async def test_the_counters_of_a_dead_process_stay_in_the_sums() -> None:
    async with linked(make_rig()) as each:
        one, _ = await each.api_process(lambda _: [5.0, 1.0])
        other, link = await each.api_process(lambda _: [7.0, 2.0])
        assert await one.ask(ReadMetrics()) == [12, 3]
        await other.close()
        await link.lost.wait()
        assert await one.ask(ReadMetrics()) == [12, 3]
        await each.api_process(lambda _: [1.0, 0.0])
        assert await one.ask(ReadMetrics()) == [13, 3]


async def test_a_process_that_does_not_answer_holds_no_command_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shortfin_apps.llm.serving.engine_link.api_link.ANSWER_S", 0.05)
    async with linked(make_rig()) as each:
        one, _ = await each.api_process(lambda _: [5.0])
        stuck, _ = await each.api_process(lambda _: [7.0])
        assert await one.ask(ReadMetrics()) == [12]
        stuck._connection._transport.pause_reading()  # type: ignore[union-attr]
        assert await one.ask(ReadMetrics()) == [12]
        assert await one.ask(AbortAll()) == [5]


async def test_a_process_that_does_not_read_has_its_requests_ended() -> None:
    """Their output is not kept without end: the connection's buffer fills, then the bound of each stream."""
    rig, held_up, aborted = make_rig(), threading.Event(), threading.Event()

    def on_call(name: str) -> None:
        """The device waits until nobody reads, and then, in the midst of the output, for the abort."""
        if name == "submit":
            assert held_up.wait(PATIENCE_S)
            assert len(rig.program.calls) < 12 or aborted.wait(PATIENCE_S)

    rig.program.faults.call = on_call
    async with linked(rig, max_unread_tokens=3) as each:
        abort = each.engine._requests._abort

        def noted_abort(request_id: str, error: LlmError | None) -> None:
            abort(request_id, error)
            aborted.set()

        each.engine._requests._abort = noted_abort
        remote, link = await each.api_process()
        other, _ = await each.api_process()
        stream = await remote.submit(call("a", PROMPT, max_tokens=40))
        link._connection.is_held_up = True
        held_up.set()
        await each.engine._requests.until_none_left()
        assert await tokens_of(await other.submit(call("b", PROMPT))) == greedy_continuation(PROMPT, 4)
        link._connection.resume_writing()
        deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason is FinishReason.ABORT
        assert "too slowly" in str(deltas[-1].error)
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert 3 < len(tokens) < 40
        assert tokens == greedy_continuation(PROMPT, 40)[: len(tokens)]


async def test_a_dump_is_written_by_the_process_of_the_engine(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    header = Header(device="fake", num_pages=32, num_window_pages=0, stride=4)
    dumps = Dumps(recorder, tmp_path / "d", header)
    async with linked(make_rig(recorder=recorder), dumps=dumps) as each:
        remote, _ = await each.api_process()
        written = await remote.dump("asked")
        assert read_dump(written.path).header.reason == "asked"
        (tmp_path / "d").rename(tmp_path / "e")
        (tmp_path / "d").touch()
        with pytest.raises(LlmError, match="--dump-dir"):
            await remote.dump("asked again")


async def test_without_a_recorder_a_dump_is_refused() -> None:
    async with linked(make_rig()) as each:
        remote, _ = await each.api_process()
        with pytest.raises(InvalidRequestError, match="--dump-dir off"):
            await remote.dump("asked")


async def test_a_snapshot_is_the_engines() -> None:
    rig = make_rig()
    gate = Gate(rig)
    async with linked(rig) as each:
        one, _ = await each.api_process()
        other, _ = await each.api_process()
        stream = await one.submit(call("a.0", PROMPT, max_tokens=9))
        gate.open()
        await tokens_of(stream)
        seen = await asyncio.gather(one.snapshot(), other.snapshot(), each.engine.snapshot())
        assert {snapshot.stats.generation_tokens for snapshot in seen} == {9}
        assert len({snapshot.page_map for snapshot in seen}) == 1
        streams = [await other.submit(call(f"b.{i}", PROMPT, max_tokens=9)) for i in range(2)]
        await asyncio.gather(*map(tokens_of, streams))
        steps = (await one.snapshot()).invocations
        assert (await other.snapshot(steps[0].serial)).invocations == steps[1:]


async def test_a_snapshot_of_an_engine_that_has_ended_is_refused() -> None:
    async with linked(make_rig()) as each:
        remote, _ = await each.api_process()
        await each.engine.close()
        with pytest.raises(UnavailableError):
            await remote.snapshot()


async def test_looks_end_with_the_connection() -> None:
    rig = make_rig()
    gate = Gate(rig)
    async with linked(rig) as each:
        remote, link = await each.api_process()
        stream = await remote.submit(call("a.0", PROMPT))
        await gate.reached()
        look = asyncio.create_task(remote.snapshot())
        await asyncio.sleep(0)
        link._connection.close()
        with pytest.raises(UnavailableError):
            await look
        gate.open()
        stream.close()


def fail(*_: object) -> Any:
    raise RuntimeError("a bug")


async def test_a_bug_ends_the_request_and_not_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(make_rig()) as each:
        remote, link = await each.api_process()
        with monkeypatch.context() as broken:
            broken.setattr(each.engine, "admit", fail)
            with pytest.raises(InvocationError):
                await remote.submit(call("a", PROMPT))
        grammar = CompiledGrammar(ANY_OBJECT, cast(LLMatcher, None), cast(LLTokenizer, None))
        with pytest.raises(InvocationError):  # NoGrammars raises NotImplementedError
            await remote.submit(call("b", PROMPT, output_grammar=grammar))
        with monkeypatch.context() as broken:
            broken.setattr(each.engine, "snapshot", fail)
            with pytest.raises(InvocationError):
                await remote.snapshot()
        with monkeypatch.context() as broken:
            broken.setattr(each.links, "carry_out", fail)
            assert await remote.ask(ReadMetrics()) == []
        assert not link.lost.is_set()
        assert await tokens_of(await remote.submit(call("c", PROMPT, max_tokens=3)))


async def test_a_state_that_cannot_be_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(make_rig()) as each:
        _, link = await each.api_process()
        with monkeypatch.context() as broken:
            broken.setattr(type(each.engine), "problem", property(fail))
            with pytest.raises(RuntimeError):
                each.links._watch()
        each.links._state = None  # whatever it is, it is news
        told = asyncio.Event()
        monkeypatch.setattr(link, "tell", lambda _: told.set())
        await told.wait()


async def test_a_process_that_cannot_be_welcomed_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(make_rig()) as each:
        monkeypatch.setattr(each.links, "_welcome", fail)
        ours, theirs = socket.socketpair()
        with theirs:
            link = await each.links.open(ours)
            with pytest.raises(UnavailableError):
                await asyncio.to_thread(wait_for_engine, theirs)
        await link.lost.wait()


async def test_a_connection_that_cannot_be_opened_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(make_rig()) as each:
        ours, theirs = socket.socketpair()
        await each.links.open(ours)
        welcome = await asyncio.to_thread(wait_for_engine, theirs)
        lost = asyncio.Event()
        remote = RemoteEngine(theirs, welcome, execute=counts_nothing, on_lost=lost.set)
        monkeypatch.setattr(remote._connection, "open", fail)
        remote.start()
        await lost.wait()
        with pytest.raises(UnavailableError):
            await remote.submit(call("a", PROMPT))
