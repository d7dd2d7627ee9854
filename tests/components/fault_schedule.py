"""A fault schedule: arrivals, departures, aborts, deadlines and device faults, all drawn from one seed.

It runs in one thread (stepped_engine.py), so the same seed is the same run. Requests come from a small
catalogue, which an undisturbed engine has answered before.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.engine.row_reader import Rows
from shortfin_apps.llm.components.kvcache.lease import Lease
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder
from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall, Terms
from shortfin_apps.llm.components.speculation.options import SpeculationOptions
from shortfin_apps.llm.contract.errors import (
    DeviceLostError,
    InvalidRequestError,
    InvocationError,
    OverloadedError,
    UnavailableError,
)
from shortfin_apps.llm.serving.frontend.async_engine import MAX_CONSECUTIVE_FAILURES, AsyncEngine
from shortfin_apps.llm.serving.frontend.stall_watch import CHECKS_PER_STALL, GIVE_UP_STALLS
from tests.components.engine_fixture import FakeDraft, Rig, call, make_draft, make_rig
from tests.components.fake_device import fake_config
from tests.components.forcing_grammar import Keys, thought_of
from tests.components.penalties import random_penalties
from tests.components.stepped_engine import NeverBackError, SteppedClock, SteppedEngine, SteppedLoop

EOS = frozenset({7})
CATALOGUE_SIZE = 64
MAX_PROMPT_TOKENS, MAX_TOKENS = 30, 16
STRIDE = 4
MIN_PAGES = -(-(MAX_PROMPT_TOKENS + MAX_TOKENS) // STRIDE) + 1  # one request, the largest; and scratch
STALL_TIMEOUT_S = 40.0
INVOCATION_S = 1.0
ENOUGH_TURNS = 5_000
REPEATS = 0.6  # of the model, so that proposed tokens are right and wrong


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[Any]
    logits: list[Any]
    reason: FinishReason | None

    def starts_with(self, other: Answer) -> bool:
        return all(mine[: len(its)] == its for mine, its in zip(self[:3], other[:3], strict=True))


@lru_cache(maxsize=1)
def catalogue() -> list[tuple[GenerateCall, Answer]]:
    """Requests, many with a common prefix, each with the answer of an engine that runs nothing else."""
    rng = random.Random(0)
    stems = [[rng.randrange(4) for _ in range(MAX_PROMPT_TOKENS)] for _ in range(5)]
    calls = [_random_call(rng, stems) for _ in range(CATALOGUE_SIZE)]
    calls = [replace(each, params=replace(each.params, **random_penalties(rng))) for each in calls]
    return [(each, undisturbed(each)) for each in calls]


def _random_call(rng: random.Random, stems: list[list[int]]) -> GenerateCall:
    prompt = rng.choice(stems)[: rng.randint(1, rng.choice([6, MAX_PROMPT_TOKENS]))]
    prompt = [*prompt[: MAX_PROMPT_TOKENS - 2], *(rng.randrange(9) for _ in range(rng.randrange(3)))]
    params: dict[str, Any] = {"max_tokens": rng.randint(1, MAX_TOKENS), "ignore_eos": rng.random() < 0.5}
    params |= random_sampling(rng) | {"chosen_logits": rng.random() < 0.2}
    if rng.random() < 0.2:
        params["stop_token_ids"] = frozenset(rng.sample(range(32), 3))
        params["min_tokens"] = rng.randint(0, params["max_tokens"])
    if rng.random() < 0.4:
        grammar = rng.choice([Keys(), Keys(), thought_of(rng.randrange(8), eos=min(EOS))])
        params |= {"output_grammar": grammar, "ignore_eos": False, "min_tokens": 0}
        if rng.random() < 0.7:
            params["logprobs"] = None  # no row is needed, so forced tokens are not drawn
    return call("", prompt, **params)


def random_sampling(rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {}
    if rng.random() < 0.4:
        params |= {"temperature": 0.8, "seed": rng.randrange(99), "top_k": rng.choice([0, 3, 9])}
    if rng.random() < 0.3:
        params["logprobs"] = rng.randrange(3)
    return params


def undisturbed(asked: GenerateCall) -> Answer:
    config = fake_config(stride=STRIDE, pages=32)
    rig = make_rig(config, prefix_cache="none", eos=EOS, repeats=REPEATS, jump_ahead=False)
    return answered_alone(rig.engine, asked)


def answered_alone(engine: Engine, asked: GenerateCall) -> Answer:
    engine.add(asked)
    deltas: list[Delta] = []
    while engine.has_work:
        deltas += engine.step()
    return joined(deltas)


def joined(deltas: list[Delta]) -> Answer:
    return Answer(
        [token for delta in deltas for token in delta.token_ids],
        [logprob for delta in deltas for logprob in delta.logprobs],
        [chosen.logit for delta in deltas for chosen in delta.logits],
        deltas[-1].finish_reason if deltas else None,
    )


class Client:
    """A client that sends one request, reads at its own pace, and may leave."""

    def __init__(self, engine: AsyncEngine, asked: GenerateCall, expected: Answer, is_slow: bool) -> None:
        self.request_id = asked.request_id
        self.expected = expected
        self.deltas: list[Delta] = []
        self.has_left = False
        self._reads = asyncio.Event()
        self._is_slow = is_slow
        self._stream = engine.admit(asked)
        self.task = asyncio.ensure_future(self._read())

    def read_on(self, for_good: bool = False) -> None:
        self._is_slow = self._is_slow and not for_good
        self._reads.set()

    def leave(self) -> None:
        """Aborts as a closed connection does: while the reader waits, or before."""
        self.has_left = True
        self.task.cancel()
        self.task = asyncio.ensure_future(self._close(self.task))

    async def _read(self) -> None:
        async for delta in self._stream:
            self.deltas.append(delta)
            if self._is_slow:
                self._reads.clear()
                await self._reads.wait()

    async def _close(self, reading: asyncio.Task[None]) -> None:
        await asyncio.gather(reading, return_exceptions=True)
        self._stream.close()

    def check(self, was_hit: bool, was_away: bool) -> None:
        """Exactly one last delta, and the output is a prefix of the undisturbed one."""
        endings = [delta.finish_reason for delta in self.deltas if delta.finish_reason is not None]
        answer = joined(self.deltas)
        reason = answer.reason
        if self.has_left:
            assert len(endings) <= 1
        else:
            assert endings == [reason], f"{self.request_id} was answered {len(endings)} times"
        assert self.expected.starts_with(answer), self.request_id
        if reason in (FinishReason.LENGTH, FinishReason.STOP):
            assert answer == self.expected, self.request_id
        if reason is FinishReason.ERROR:
            error = self.deltas[-1].error
            assert was_hit or (was_away and isinstance(error, UnavailableError)), (self.request_id, error)


def random_rig(
    rng: random.Random,
    clock: Callable[[], float],
    recorder: FlightRecorder | None = None,
) -> Rig:
    """An engine of any mode, cache and shapes; mostly with so few pages that requests are preempted."""
    extend_rank = rng.choice([1, 2])
    speculation = SpeculationOptions(
        max_tokens=rng.choice([0, 1, 3, 8]),
        row_cost=rng.choice([0, 0.05]),
    )
    speculates = extend_rank == 1 and rng.random() < 0.7
    drafter = rng.choice(["none", "model", "layer"]) if speculates else "none"
    max_running = rng.randint(1, 8)
    top_k = rng.choice([None, 1, 4])
    loops, samples, adjusts = (
        rng.choice([(), (1, 8), (2, 8), (8,)]),
        rng.choice([(), (1, 2, 8), (3,)]),
        rng.random(),
    )
    if top_k is None:
        loops = samples = ()
    rig = make_rig(
        fake_config(
            stride=STRIDE,
            pages=MIN_PAGES + rng.choice([0, 0, 0, 1, 8]),
            prefill=(1, rng.choice([2, 4])),
            top_k=top_k,
            window=rng.choice([None, None, 1, 3, 6, 13]),
            states=rng.random() < 0.4,
        ),
        more_window_pages=rng.choice([0, 0, 1, 4, 16]),
        prefix_cache=rng.choice(["none", "trie", "trie"]),
        chunk_tokens=rng.choice([4, 8, 16]),
        max_running=max_running,
        eos=EOS,
        mode=rng.choice(["default", "extend-attention"]),
        token_budget=rng.choice([None, 8, 16, 40]),
        extend_rank=extend_rank,
        speculation=speculation if speculates else None,
        draft=random_draft(rng) if drafter == "model" else None,
        # A recorder leaves out drafts, and a replay's requests have no rows of hidden states.
        drafts=rng.choice([0.0, 0.2, 1.0]) if drafter == "layer" and recorder is None else None,
        repeats=REPEATS,
        loop_sizes=loops,
        sample_sizes=samples,
        adjusted_sample_sizes=samples if adjusts < 0.7 else (),
        logprob_sizes=() if top_k is None else rng.choice([(), (1, 2, 8), (3,)]),
        depth=rng.choice([0, 1, 1, 2]),
        static_threshold=rng.choice([None, None, 0, 2, 8]) if extend_rank == 1 else None,
        reads_masked=rng.random() < 0.5,
        scheduling={
            "max_long_prefills": rng.randint(1, 2),
            "long_prefill_tokens": 12,
            "tenant_weights": {"b": 3.0},
        },
        recorder=recorder,
        clock=clock,
    )
    return rig


class Invoked:
    """The requests that a device call is for: the requests of the step that is launched or completed.

    `num_without_draw` counts decodes whose next token was known at the launch, because a grammar forced it.
    """

    def __init__(self, engine: Engine) -> None:
        self.request_ids: list[str] = []
        self.num_without_draw = 0
        self._pipeline = pipeline = engine._pipeline
        self._launch, self._complete, self._draw_late = (
            pipeline.launch,
            pipeline.complete,
            pipeline.draw_late,
        )
        pipeline.launch = self._launching  # type: ignore[method-assign]
        pipeline.complete = self._completing  # type: ignore[method-assign]
        pipeline.draw_late = self._drawing  # type: ignore[method-assign]

    def _note(self, batch: Batch) -> None:
        self.request_ids = [task.request.request_id for task in batch.tasks]

    def _launching(self, batch: Batch, began_s: float) -> None:
        self._note(batch)
        self.num_without_draw += sum(len(t.token_ids) == 1 and not t.completes for t in batch.tasks)
        self._launch(batch, began_s)

    def _completing(self) -> Rows:
        self._note(self._pipeline.first.batch)
        return self._complete()

    def _drawing(self) -> None:
        if len(self._pipeline):
            self._note(self._pipeline.first.batch)
        self._draw_late()


def random_draft(rng: random.Random) -> FakeDraft:
    """A draft model that is right or wrong, in many pages or few, and fails now and then."""
    draft = make_draft(
        fake_config(
            stride=rng.choice([STRIDE, 8]),
            pages=rng.choice([3, MIN_PAGES, 64]),
            max_seq_len=rng.choice([20, 64]),
            window=rng.choice([None, None, 1, 6]),
        ),
        repeats=REPEATS,
        errs=rng.choice([0, 0.2, 1]),
        max_tokens=rng.choice([1, 3, 8]),
        round_cost=rng.choice([0, 0.1]),
        catch_up_tokens=rng.choice([1, 8, 64]),
        prefix_cache=rng.choice(["none", "trie"]),
        loop_sizes=rng.choice([(1, 2, 4, 8), (8,)]),
    )
    fault_rate, nan_rate = rng.choice([0, 0, 0.01, 0.2]), rng.choice([0, 0, 0.05])

    def call(name: str) -> None:
        if rng.random() < fault_rate:
            raise InvocationError(f"{name} of the draft model failed")

    draft.program.faults.call = call
    draft.program.faults.spoil = lambda row: rng.random() < nan_rate
    return draft


def random_arrival(rng: random.Random, request_id: str) -> tuple[GenerateCall, Answer]:
    """A request of the catalogue on random terms, and the undisturbed answer to it."""
    asked, expected = rng.choice(catalogue())
    return on_random_terms(rng, asked, request_id), expected


def on_random_terms(rng: random.Random, asked: GenerateCall, request_id: str) -> GenerateCall:
    terms = Terms(
        priority=rng.randint(-2, 2),
        tenant=rng.choice(["", "a", "b"]),
        timeout_s=rng.choice([None] * 8 + [0.0, 6.0, 20.0]),
    )
    salt = rng.choice([None, None, "s"])
    resumes = rng.random() < 0.05
    return replace(asked, request_id=request_id, terms=terms, cache_salt=salt, resumes=resumes)


class Schedule:
    """One schedule; `run` raises if an invariant does not hold."""

    recorder: FlightRecorder | None = None  # of the rig, which may have one

    def __init__(self, seed: int) -> None:
        rng = self._rng = random.Random(seed)
        self._clock = SteppedClock()
        self._loop = SteppedLoop(self._clock)
        self.rig = self._make_rig()
        self.engine = SteppedEngine(
            self.rig.engine,
            max_requests=rng.randint(2, 12),
            max_queue_tokens=rng.choice([20, 60, 400]),
            max_unread_tokens=rng.choice([3, 512, 512]),
            stall_timeout_s=STALL_TIMEOUT_S,
            clock=self._clock,
        )
        self.clients: list[Client] = []
        self._fault_rate = rng.choice([0.0, 0.0, 0.002, 0.01, 0.05])
        self._act_in_call_rate = rng.choice([0.0, 0.01, 0.05])
        self._bug_rate = rng.choice([0.0] * 9 + [0.05])
        self._had_bug = False
        self._is_dead = False
        self._lost_in: str | None = None  # the call in which the device was lost for good
        self._stalls = 0
        self.invoked = Invoked(self.rig.engine)
        self._hit: set[str] = set()
        self._spoiled_row = -1
        self._aborted: set[str] = set()
        self._drains: list[asyncio.Task[None]] = []
        self._publish = self.rig.cache.publish
        self.rig.cache.publish = self._publish_or_not  # type: ignore[method-assign]
        self.rig.program.faults.call = self._on_call
        self.rig.program.faults.spoil = self._is_spoiled

    def run(self) -> None:
        try:
            self._on_loop(self._start)
            for _ in range(self._rng.randint(5, 30)):
                self._act()
            self._settle()
            self._check()
        finally:
            self._end()

    def _make_rig(self) -> Rig:
        self.recorder = FlightRecorder(clock=self._clock) if self._rng.random() < 0.3 else None
        return random_rig(self._rng, self._clock, self.recorder)

    def _arrival(self, request_id: str) -> tuple[GenerateCall, Answer]:
        return random_arrival(self._rng, request_id)

    def _end(self) -> None:
        self._loop.close()

    def _is_spoiled(self, row: int) -> bool:
        if row == self._spoiled_row:
            self._hit.update(self.invoked.request_ids)
        return row == self._spoiled_row

    def _start(self) -> None:
        self.engine.start()

    def _act(self) -> None:
        acts = {
            self._turns: 10,
            self._arrive: 7,
            self._leave: 2,
            self._abort: 2,
            self._read_on: 2,
            self._time_passes: 1,
            self.engine.flush_cache: 0.5,
            self.engine.abort_all: 0.1,
            self._drain: 0.1,
        }
        [act] = self._rng.choices(list(acts), list(acts.values()))
        if act == self._turns:
            act()
        else:
            self._on_loop(act)

    def _on_loop(self, act: Callable[[], Any]) -> None:
        """Calls it in the event loop, before or after other callbacks."""
        self._loop.call_soon(act)
        self._loop.run(self._rng.randint(1, 3))

    def _turns(self) -> None:
        for _ in range(self._rng.randint(1, 4)):
            ending = {client.request_id for client in self.clients if client.has_left and client.task.done()}
            ending |= self._aborted
            self.engine.turn()
            assert self.engine.is_stuck or ending <= self.engine.last.keys(), "not freed within a step"
            self._check_pages()
            if self._rng.random() < 0.8:
                self._loop.run()

    def _arrive(self) -> None:
        for _ in range(self._rng.choice([1, 1, 3])):
            self._arrive_once()

    def _arrive_once(self) -> None:
        request_id = str(len(self.clients))
        asked, expected = self._arrival(request_id)
        try:
            is_slow = self._rng.random() < 0.2
            self.clients.append(Client(self.engine, asked, expected, is_slow=is_slow))
        except (OverloadedError, UnavailableError, InvalidRequestError):
            assert request_id not in self.engine.last

    def _leave(self) -> None:
        if staying := [client for client in self.clients if not client.has_left]:
            self._rng.choice(staying).leave()

    def _abort(self) -> None:
        if self.clients:
            request_id = self._rng.choice(self.clients).request_id
            if self.engine.abort(request_id):
                self._aborted.add(request_id)

    def _read_on(self) -> None:
        if self.clients:
            self._rng.choice(self.clients).read_on()

    def _time_passes(self) -> None:
        self._clock.now_s += self._rng.choice([2.0, 10.0])

    def _drain(self) -> None:
        self._drains.append(asyncio.ensure_future(self.engine.drain(self._rng.choice([0.0, 5.0]))))

    def _on_call(self, name: str) -> None:
        """In every call of the device: clients act meanwhile, and sometimes a fault occurs."""
        rng = self._rng
        if name == "submit":
            self._clock.now_s += INVOCATION_S
            self._spoiled_row = -1
        if rng.random() < self._act_in_call_rate:
            self._on_loop(rng.choice([self._arrive, self._leave, self._abort, self._read_on]))
        if self._is_dead or self._lost_in is not None or rng.random() < self._fault_rate:
            self._break(name)

    def _break(self, name: str) -> None:
        self._hit.update(self.invoked.request_ids)
        faults = {"raise": 6, "nan": 4, "stall": 2, "die": 0.5, "lost": 0.5, "never back": 0.5}
        fault = self._rng.choices(list(faults), list(faults.values()))[0]
        if fault == "lost" and self._lost_in is None and not self._is_dead:
            self._lost_in = name
        if self._lost_in is not None:
            raise DeviceLostError(f"lost in {self._lost_in}")
        self._is_dead = self._is_dead or fault == "die"
        if self._is_dead or fault == "raise":
            raise self._rng.choice([InvocationError, RuntimeError, MemoryError])(f"broken in {name}")
        if fault == "nan":
            self._spoiled_row = self._rng.randrange(max(1, len(self.invoked.request_ids)))
            return
        self._stalls += 1
        self._clock.now_s += 2 * STALL_TIMEOUT_S
        self._loop.run(3)
        if fault == "never back":
            raise NeverBackError

    def _publish_or_not(
        self, lease: Lease, token_ids: Sequence[int], num_computed: int | None = None
    ) -> None:
        """A bug in the engine itself, in the middle of a commit."""
        if self._rng.random() < self._bug_rate:
            self._had_bug = True
            raise ZeroDivisionError
        self._publish(lease, token_ids, num_computed)

    def _settle(self) -> None:
        """Every client reads to the end, and the engine steps until nothing is left."""
        self._fault_rate *= self._rng.choice([0, 1])
        for _ in range(ENOUGH_TURNS):
            for client in self.clients:
                client.read_on(for_good=True)
            self.engine.turn()
            self._clock.now_s += self.engine.is_stuck * STALL_TIMEOUT_S
            self._loop.run(3)
            waiting = [*(client.task for client in self.clients), *self._drains]
            if not self.engine.has_work and all(task.done() for task in waiting):
                return
        raise AssertionError("the engine makes no progress")

    def _check_pages(self) -> None:
        for cache in self.rig.caches:
            cache.check_integrity()
        num_requests, num_tokens = self.engine.reserved
        assert num_requests >= 0
        assert num_tokens >= 0

    def _check(self) -> None:
        self._check_pages()
        for client in self.clients:
            was_away = self._stalls > 0 or self._lost_in is not None
            client.check(self._had_bug or client.request_id in self._hit, was_away)
        assert self.engine.reserved == (0, 0), "places are still taken"
        if self.engine.is_stuck:
            self._check_hang()
            return  # the stuck step holds its pages
        self._check_loss()
        assert not self.rig.scheduler.running
        assert not self.rig.scheduler.waiting
        assert self.rig.cache.usage().leased == 0
        assert (windows := self.rig.cache.window_usage()) is None or windows.leased == 0
        assert self.rig.all_pages_back()

    def _check_hang(self) -> None:
        """The engine is lost once the device has not answered for twice the stall timeout."""
        assert not self.engine.healthy
        for _ in range(GIVE_UP_STALLS * CHECKS_PER_STALL + 2):
            self._clock.now_s += STALL_TIMEOUT_S / CHECKS_PER_STALL
            self._loop.run(3)
        assert "not answered" in self._loss

    def _check_loss(self) -> None:
        """A lost device is told, and the recorder names the launch; only such a one ends the engine."""
        stats = self.engine.stats()
        if stats.lost_device is None:
            assert self._stalls or not self._told_loss
            assert self.engine.healthy is (stats.consecutive_failures < MAX_CONSECUTIVE_FAILURES)
            return
        assert self._lost_in is not None
        assert self.engine.problem == stats.lost_device
        assert self._stalls or self._loss == stats.lost_device
        if self.recorder is not None and self._lost_in in ("submit", "wait"):
            last = self.recorder.recording().last_launch(self._clock.now_s)
            assert last is not None
            assert last.state != "done"
            assert last.rows > 0

    @property
    def _told_loss(self) -> bool:
        return self.engine._lost.is_set()

    @property
    def _loss(self) -> str:
        return self._loop.run_until_complete(self.engine.until_lost())
