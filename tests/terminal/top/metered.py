"""A server's real metrics over an engine whose counters the test sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import PlainTextResponse

from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.invocation.entry_counts import EntryCounts
from shortfin_apps.llm.components.kvcache.lease import CacheUsage
from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.contract.abi import EntryClass
from shortfin_apps.llm.contract.errors import OverloadedError
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.terminal.top.figures import Reading, parsed
from tests.components.stepped_engine import SteppedClock
from tests.scripted_server import Answer
from tests.serving.api.scripted_engine import ScriptedEngine

INFO = {"version": "1.2", "served_model_name": "tiny", "server": {"device": "cpu", "batch_mode": "default"}}


class CountedEngine(ScriptedEngine):
    """An engine at rest, with counters to be set."""

    def __init__(self) -> None:
        super().__init__(lambda call: iter(()))
        self.entries: dict[str, EntryCounts] = {}
        self.counters: dict[str, Any] = {
            "num_running": 0,
            "num_waiting": 0,
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "generation_tokens": 0,
            "preemptions": 0,
            "step_s": 0.0,
            "pages": CacheUsage(total=100, free=100, cached=0, leased=0),
        }

    def stats(self) -> EngineStats:
        return replace(super().stats(), entries=dict(self.entries), **self.counters)


class MeteredServer:
    """What `/metrics` would say; `clock` is that of the requests and of the readings."""

    def __init__(self) -> None:
        self.clock = SteppedClock()
        self.metrics = ServerMetrics("tiny", self.clock)
        self.engine = CountedEngine()
        self.metrics.watch(self.engine)

    def serve(self, ttft_s: float, *itl_s: float) -> None:
        """A request with these times. The clock ends where it was."""
        started = self.clock.now_s
        timer = self.metrics.start_request(prompt_tokens=10, max_tokens=50)
        for gap_s in (ttft_s, *itl_s):
            self.clock.now_s += gap_s
            timer.tokens(1, queue_s=0.0)
        timer.finish(FinishReason.STOP)
        self.clock.now_s = started

    def refuse(self) -> None:
        self.metrics.rejected(OverloadedError("full"))

    def invoke(self, entry: str, lengths: Sequence[int], rows: int) -> None:
        self.engine.entries.setdefault(entry, EntryCounts(EntryClass.STATIC)).add(list(lengths), rows)

    def work(self, seconds: float) -> None:
        """An interval of all kinds of work."""
        self.clock.now_s += seconds
        counters = self.engine.counters
        counters["prompt_tokens"] += 300
        counters["cached_tokens"] += 100
        counters["generation_tokens"] += 50
        counters["preemptions"] += 2
        counters["step_s"] += seconds / 2
        counters.update(
            num_running=3, num_waiting=4, pages=CacheUsage(total=100, free=30, cached=20, leased=50)
        )
        for ttft_s in (0.015, 0.015, 0.015, 0.2):
            self.serve(ttft_s, 0.002, 0.002)
        self.refuse()
        self.invoke("prefill_bs4", [100, 200], 384)
        self.invoke("decode_bs4", [1, 1, 1], 4)
        self.invoke("decode_bs4", [1, 1], 4)

    def text(self) -> str:
        return self.metrics.exposition().decode()

    def reading(self) -> Reading:
        return parsed(self.text(), self.clock.now_s)

    def answer(self) -> Answer:
        """The answer to `/metrics` as of now."""
        text = self.text()
        return lambda _, __: PlainTextResponse(text)
