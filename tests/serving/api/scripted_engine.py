"""An engine that answers from a script and records its calls."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from shortfin_apps.llm.components.engine.snapshot import OWNED, PageMap, RequestSnapshot, Snapshot
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.invocation.entry_counts import EntryCounts, TableCounts
from shortfin_apps.llm.components.kvcache.lease import CacheUsage
from shortfin_apps.llm.components.recorder.dumps import WrittenDump
from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall, TokenLogprobs
from shortfin_apps.llm.components.request.request import State
from shortfin_apps.llm.contract.abi import EntryClass
from shortfin_apps.llm.contract.errors import LlmError, OverloadedError, UnavailableError
from shortfin_apps.llm.serving.frontend.delta_stream import DeltaStream
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer

Script = Callable[[GenerateCall], Iterator[Delta]]


class ScriptedEngine:
    """Implements EngineClient. While `gate` is cleared, every stream waits before its next delta."""

    def __init__(self, script: Script, capacity: int = 1000) -> None:
        self.script = script
        self.capacity = capacity
        self.queue_tokens = 2**20
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[GenerateCall] = []
        self.live: set[str] = set()
        self._left = asyncio.Event()  # a request has ended
        self.aborted: list[str] = []
        self.waiting = asyncio.Event()  # a stream waits at the gate
        self.freed = asyncio.Event()  # some request was aborted
        self.draining = False
        self.drains = asyncio.Event()  # set when `drain` is called
        self.flushes = 0
        self.dumps: list[str] = []
        self.dump_path: Path | None = None
        self.removes_dumps = False  # before they are read
        self.healthy = True
        self.drained_with: float | None = None
        self.stuck = False  # requests do not end when drained
        self.started = self.closed = False
        self.returns_logits = True
        self.closed_with: float | None = None
        self.looks: list[int] = []  # the steps that snapshots were asked for behind

    @property
    def max_requests(self) -> int:
        return self.capacity

    @property
    def max_queue_tokens(self) -> int:
        return self.queue_tokens

    @property
    def max_request_tokens(self) -> int:
        return 2**20

    @property
    def problem(self) -> str | None:
        return None if self.healthy else "the engine is stuck"

    @property
    def ready(self) -> bool:
        return not self.draining

    async def submit(self, call: GenerateCall) -> DeltaStream:
        if self.draining and not call.resumes:
            raise UnavailableError("draining")
        if len(self.live) >= self.capacity and not call.resumes:
            raise OverloadedError("full", retry_after_s=2.5)
        assert call.request_id not in self.live
        self.calls.append(call)
        self.live.add(call.request_id)
        return ScriptedStream(self._stream(call), partial(self._leave, call.request_id))

    def abort(self, request_id: str, error: LlmError | None = None) -> bool:
        if request_id not in self.live:
            return False
        self.live.remove(request_id)
        self.aborted.append(request_id)
        self.freed.set()
        self._left.set()
        return True

    def _leave(self, request_id: str) -> None:
        self.abort(request_id)

    def abort_all(self) -> int:
        return sum([self.abort(request_id) for request_id in list(self.live)])

    def flush_cache(self) -> None:
        self.flushes += 1

    async def dump(self, reason: str) -> WrittenDump:
        self.dumps.append(reason)
        if self.dump_path is None:
            raise LlmError("no space is left")
        written = WrittenDump(self.dump_path, self.dump_path.stat().st_size)
        if self.removes_dumps:
            self.dump_path.unlink()
        return written

    def stats(self) -> EngineStats:
        return EngineStats(
            page_tokens=16,
            shares_prefixes=True,
            num_waiting=1,
            num_running=2,
            pages=CacheUsage(total=10, free=5, cached=1, leased=4),
            steps=7,
            block_tables=TableCounts(rows_joined=4, rows_grew=9, uploads=6),
            prompt_tokens=11,
            cached_tokens=5,
            generation_tokens=13,
            preemptions=1,
            entries=_entries(),
            step_s=0.5,
            device_s=0.4,
            uploads=21,
            steps_ahead=3,
            discarded_tokens=2,
            self_tests=4,
            self_test_failures=1,
        )

    async def snapshot(self, after: int = 0) -> Snapshot:
        """All requests run, in a page each."""
        self.looks.append(after)
        if self.closed:
            raise UnavailableError("closed")
        live = [call for call in self.calls if call.request_id in self.live]
        return Snapshot(
            at_s=float(len(self.looks)),
            stats=self.stats(),
            requests=tuple(map(_snapshot_of, live)),
            tenants=(),
            page_map=PageMap(1, tuple(number for index in range(len(live)) for number in (OWNED + index, 1))),
            window_map=None,
        )

    async def drain(self, timeout_s: float) -> None:
        self.draining, self.drained_with = True, timeout_s
        self.drains.set()
        if not self.stuck:
            self.gate.set()
        while self.live:
            self._left.clear()
            await self._left.wait()

    def start(self) -> None:
        self.started = True

    async def close(self, patience_s: float = math.inf) -> bool:
        self.closed, self.closed_with = True, patience_s
        return not self.stuck

    async def _stream(self, call: GenerateCall) -> AsyncGenerator[Delta, None]:
        for delta in self.script(call):
            self.waiting.set()
            await self.gate.wait()
            if call.request_id not in self.live:
                yield Delta(request_id=call.request_id, finish_reason=FinishReason.ABORT)
                return
            if delta.finish_reason is not None:
                self.live.discard(call.request_id)
                self._left.set()
            yield delta


class ScriptedStream(DeltaStream):
    """Puts each of `deltas` when the one before it was taken. Their error is the reader's."""

    def __init__(self, deltas: AsyncGenerator[Delta, None], on_close: Callable[[], None]) -> None:
        super().__init__(on_close)
        self._taken = asyncio.Event()
        self._failure: Exception | None = None
        self._feeding = asyncio.create_task(self._feed(deltas))

    def take(self) -> Delta | None:
        if self._failure is not None:
            raise self._failure
        self._taken.set()
        return super().take()

    def close(self) -> None:
        self._feeding.cancel()
        super().close()

    async def _feed(self, deltas: AsyncGenerator[Delta, None]) -> None:
        try:
            async for delta in deltas:
                self._taken.clear()
                self.put(delta)
                await asyncio.sleep(0)
                await self._taken.wait()
        except Exception as error:
            self._failure = error
            self._tell()


def saying(tokenizer: Tokenizer, text: str, *, cached: int = 0) -> Script:
    """Generates `text`, then end-of-sequence, one token per step, up to `max_tokens`."""
    ids = [*tokenizer.encode(text), *tokenizer.eos_token_ids]
    return lambda call: _spell(call, ids, FinishReason.STOP, cached)


def forever(tokenizer: Tokenizer, text: str) -> Script:
    """Repeats `text` until `max_tokens`."""
    ids = tokenizer.encode(text)
    return lambda call: _spell(call, ids * (call.params.max_tokens // len(ids) + 2), FinishReason.LENGTH, 0)


def aborting(error: LlmError, after: Sequence[int] = ()) -> Script:
    """Generates the tokens `after`, then is aborted with `error`."""
    return failing(error, after, FinishReason.ABORT)


def failing(error: LlmError, after: Sequence[int] = (), reason: FinishReason = FinishReason.ERROR) -> Script:
    def script(call: GenerateCall) -> Iterator[Delta]:
        for token_id in after:
            yield Delta(request_id=call.request_id, token_ids=(token_id,))
        yield Delta(request_id=call.request_id, finish_reason=reason, error=error)

    return script


def _spell(call: GenerateCall, ids: list[int], last: FinishReason, cached: int) -> Iterator[Delta]:
    if call.params.forced_token_ids:
        ids, last = list(call.params.forced_token_ids), FinishReason.LENGTH
    count = min(len(ids), call.params.max_tokens)
    for position, token_id in enumerate(ids[:count]):
        ended = position + 1 == count
        reason = (last if count == len(ids) else FinishReason.LENGTH) if ended else None
        yield Delta(
            request_id=call.request_id,
            token_ids=(token_id,),
            logprobs=() if call.params.logprobs is None else (_logprobs(token_id, call.params.logprobs),),
            num_cached_tokens=cached,
            finish_reason=reason,
        )


def _snapshot_of(call: GenerateCall) -> RequestSnapshot:
    return RequestSnapshot(
        request_id=call.request_id,
        tenant=call.terms.tenant,
        state=State.RUNNING,
        prompt_tokens=len(call.prompt_token_ids),
        cached_tokens=0,
        computed_tokens=len(call.prompt_token_ids),
        output_tokens=1,
        max_tokens=call.params.max_tokens,
        pages=1,
        age_s=0.5,
    )


def _entries() -> dict[str, EntryCounts]:
    decode, prefill = EntryCounts(EntryClass.STATIC), EntryCounts(EntryClass.DYNAMIC)
    for _ in range(6):
        decode.add([1, 1, 1], rows=4)
    prefill.add([117], rows=128)
    return {"decode_bs4": decode, "prefill_bs1": prefill}


def _logprobs(token_id: int, count: int) -> TokenLogprobs:
    top = tuple((token_id + i, -0.5 * (i + 1)) for i in range(count))
    return TokenLogprobs(logprob=-0.5, top=top, rank=1)
