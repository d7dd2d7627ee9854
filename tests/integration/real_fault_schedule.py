"""Fault schedules over a compiled model, on a device that fails as the fake one does.

Its results are real, so that what a schedule compares with an undisturbed engine are the bits of logits.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from shortfin_apps.llm.components.batching import BATCH_MODES, make_mode
from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.components.batching.scheduler import Scheduler
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.invocation.buckets import Buckets
from shortfin_apps.llm.components.invocation.padding_runs import warm_up
from shortfin_apps.llm.components.invocation.page_table import make_page_cache, make_runner
from shortfin_apps.llm.components.request.messages import FinishReason, GenerateCall
from shortfin_apps.llm.components.runtime.device import (
    Array,
    Device,
    DeviceBuffer,
    EntrySignature,
    Pending,
    Program,
)
from shortfin_apps.llm.components.speculation.options import SpeculationOptions
from shortfin_apps.llm.contract.config import ModelConfig
from tests.components.engine_fixture import Rig, call
from tests.components.fake_device import FakePending, Faults
from tests.components.fault_schedule import (
    Answer,
    Schedule,
    answered_alone,
    on_random_terms,
    random_sampling,
)
from tests.components.penalties import random_penalties

MAX_PROMPT_TOKENS, MAX_TOKENS = 44, 36
NUM_STEMS = 5
FEW_IDS = 12  # of which prompts are made: repetitive, so that proposals are right now and then
MANY_PAGES = 32
LONG_PREFILL_TOKENS = 48


@dataclass
class FaultyProgram:
    """A program whose calls fail as `faults` says, before they reach the device or when it is done."""

    program: Program
    faults: Faults = field(default_factory=Faults)
    in_flight: deque[FakePending] = field(default_factory=deque)
    _running: list[Pending] = field(default_factory=list)

    @property
    def entries(self) -> Mapping[str, EntrySignature]:
        return self.program.entries

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> FakePending:
        self.faults.call("submit")
        pending = self.program.submit(entry, arguments)
        self._running.append(pending)
        return FakePending(lambda: self._finish(pending), self.in_flight, pending.results())

    def _finish(self, pending: Pending) -> None:
        self._running.remove(pending)
        pending.wait()
        try:
            self.faults.call("wait")
        except BaseException:
            while self._running:  # which fail, too, and write nothing any more
                self._running.pop().wait()
            raise


class FaultyDevice:
    """A device whose transfers fail as `faults` says."""

    def __init__(self, device: Device, faults: Faults) -> None:
        self._device = device
        self._faults = faults

    def upload(self, array: Array) -> DeviceBuffer:
        self._faults.call("upload")
        return self._device.upload(array)

    def download(self, buffer: DeviceBuffer) -> Array:
        self._faults.call("download")
        return self._device.download(buffer)

    def clear(self, buffer: DeviceBuffer, rows: Sequence[int]) -> None:
        self._faults.call("clear")
        self._device.clear(buffer, rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


@dataclass
class Served:
    """A model on an open device, and a catalogue of requests with the answers of an engine that runs nothing
    else.
    """

    device: Device
    program: Program
    config: ModelConfig
    catalogue: list[tuple[GenerateCall, Answer]] = field(default_factory=list)

    def ask(self, size: int, seed: int = 0) -> None:
        """Makes the catalogue."""
        rng = random.Random(seed)
        ids = [rng.randrange(32, 127) for _ in range(FEW_IDS)]
        stems = [[rng.choice(ids) for _ in range(MAX_PROMPT_TOKENS)] for _ in range(NUM_STEMS)]
        calls = [_random_call(rng, stems) for _ in range(size)]
        calls = [replace(each, params=replace(each.params, **random_penalties(rng))) for each in calls]
        self.catalogue += [(each, self._undisturbed(each)) for each in calls]

    def _undisturbed(self, asked: GenerateCall) -> Answer:
        answer = answered_alone(self.rig(prefix_cache="none").engine, asked)
        assert answer.reason in (FinishReason.LENGTH, FinishReason.STOP)
        return answer

    @property
    def least_pages(self) -> int:
        """One request, the largest; and scratch."""
        return -(-(MAX_PROMPT_TOKENS + MAX_TOKENS) // self.config.stride) + 1

    @property
    def takes_proposals(self) -> bool:
        return any(name.startswith("extend") for name in self.program.entries)

    def rig(
        self,
        *,
        prefix_cache: Any,
        mode: BatchModeName = "default",
        pages: int = MANY_PAGES,
        more_window_pages: int = 0,
        chunk_tokens: int = 64,
        token_budget: int | None = None,
        max_running: int = 1,
        scheduling: Mapping[str, Any] | None = None,
        **of_engine: Any,
    ) -> Rig:
        program, config = FaultyProgram(self.program), self.config
        device = cast(Device, FaultyDevice(self.device, program.faults))
        buckets = Buckets(program.entries, config.stride, has_prefill_position=config.has_prefill_position)
        options = BatchSettings(batch_mode=mode, chunk_tokens=chunk_tokens, token_budget=token_budget)
        window_pages = pages + more_window_pages
        runner = make_runner(device, program, config, pages, window_pages)
        warm_up(runner, lambda done, total: None)
        cache = make_page_cache(config, prefix_cache, pages, window_pages)
        scheduler = Scheduler(cache, make_mode(options, config, buckets), max_running, **(scheduling or {}))
        engine = Engine(
            scheduler=scheduler,
            cache=cache,
            runner=runner,
            max_seq_len=config.max_seq_len,
            eos_token_ids=frozenset(),
            strict=True,
            **of_engine,
        )
        return Rig(engine, scheduler, cache, runner, cast(Any, program), cast(Any, device), cast(Any, None))


def _random_call(rng: random.Random, stems: list[list[int]]) -> GenerateCall:
    prompt = rng.choice(stems)[: rng.randint(1, rng.choice([20, MAX_PROMPT_TOKENS]))]
    max_tokens = rng.randint(1, MAX_TOKENS)
    return call("", prompt, max_tokens, ignore_eos=True, chosen_logits=True, **random_sampling(rng))


class RealSchedule(Schedule):
    """One schedule over a compiled model. A fault that makes a row NaN does nothing here."""

    def __init__(self, seed: int, served: Served) -> None:
        self._served = served
        super().__init__(seed)

    def _make_rig(self) -> Rig:
        rng, served = self._rng, self._served
        speculation = SpeculationOptions(max_tokens=rng.choice([0, 1, 3, 8]), row_cost=rng.choice([0, 0.05]))
        speculates = served.takes_proposals and rng.random() < 0.5
        rig = served.rig(
            pages=served.least_pages + rng.choice([0, 0, 0, 1, 2]),
            prefix_cache=rng.choice(["none", "trie", "trie"]),
            chunk_tokens=served.config.stride * rng.choice([1, 2, 4]),
            max_running=rng.randint(1, 8),
            mode=rng.choice(list(BATCH_MODES)),
            token_budget=rng.choice([None, 32, 48, 96]),
            scheduling={
                "max_long_prefills": rng.randint(1, 2),
                "long_prefill_tokens": LONG_PREFILL_TOKENS,
                "tenant_weights": {"b": 3.0},
            },
            speculation=speculation if speculates else None,
            depth=rng.choice([0, 1, 2]),
            clock=self._clock,
            more_window_pages=rng.choice([0, 4, 24]),
        )
        return rig

    def _arrive(self) -> None:
        for _ in range(self._rng.choice([1, 3, 6])):
            self._arrive_once()

    def _settle(self) -> None:
        self._act_in_call_rate = 0.0  # or so many would arrive during each that there is no end
        super()._settle()

    def _arrival(self, request_id: str) -> tuple[GenerateCall, Answer]:
        asked, expected = self._rng.choice(self._served.catalogue)
        return on_random_terms(self._rng, asked, request_id), expected

    @property
    def num_whole(self) -> int:
        """Requests that were answered to their end."""
        ends = (FinishReason.LENGTH, FinishReason.STOP)
        return sum(client.deltas[-1].finish_reason in ends for client in self.clients if client.deltas)
