"""The engine on simulated time: the real scheduler, modes, cache and runner on the fake device.

A cost model determines how long an invocation takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from shortfin_apps.llm.components.batching import make_mode
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.batching.scheduler import Scheduler
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.kvcache import make_cache
from shortfin_apps.llm.components.request.messages import Delta
from shortfin_apps.llm.components.runtime.device import DeviceBuffer
from shortfin_apps.llm.contract.config import ModelConfig, PagedKVCacheConfig
from shortfin_apps.llm.model.spec import BuildOptions
from tests.components.engine_fixture import call
from tests.components.fake_device import FakeDevice, FakePending, FakeProgram, array_of


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Time of an invocation: the larger of reading the weights (`weights_s`) and computing the rows
    (`overhead_s` + `row_s` each, padding included; `decode_row_s` in a decode entry), and `key_s` for each
    key that a row attends to.
    """

    weights_s: float
    overhead_s: float
    row_s: float
    decode_row_s: float
    key_s: float

    def invocation_s(self, entry: str, rows: int, keys: int) -> float:
        row_s = self.decode_row_s if entry.startswith("decode") else self.row_s
        return max(self.weights_s, self.overhead_s + rows * row_s) + keys * self.key_s


# SmolLM2-135M in bf16 on 2 cores with AVX-512-BF16, as measured at decode_bs1, 8, 32 (11.5, 17.8, 55.6 ms),
# prefills of 128 and 512 tokens (139, 558 ms) and of 4,096 in chunks.
AVX512 = CostModel(weights_s=11.5e-3, overhead_s=5.2e-3, row_s=1.08e-3, decode_row_s=1.58e-3, key_s=0.38e-6)
# Expected for AMX kernels on the same machine; attention as above.
AMX = CostModel(weights_s=10e-3, overhead_s=2e-3, row_s=0.25e-3, decode_row_s=0.25e-3, key_s=0.38e-6)


@dataclass
class SimulatedClock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class TimedProgram(FakeProgram):
    """A fake program whose invocations advance the clock."""

    def __init__(self, config: ModelConfig, cost: CostModel, clock: SimulatedClock) -> None:
        super().__init__(config, extend_rank=1)
        self.cost = cost
        self.clock = clock

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> FakePending:
        arrays = [array_of(a) for a in arguments]
        given = self.arguments_of(entry, arrays)
        spans = zip(given["start_positions"].tolist(), given["seq_lens"].tolist(), strict=True)
        rows = given["tokens"].size
        keys = sum((n * (n + 1) - s * (s + 1)) // 2 for s, n in spans)
        self.clock.now_s += self.cost.invocation_s(entry, rows, keys)
        return super().submit(entry, arguments)


def smollm2_config() -> ModelConfig:
    return ModelConfig(
        max_seq_len=8192,
        transformer_block_count=30,
        attn_head_dim=64,
        prefill_batch_sizes=BuildOptions().prefill_batch_sizes,
        decode_batch_sizes=BuildOptions().decode_batch_sizes,
        has_prefill_position=True,
        top_k=4,
        paged_kv_cache=PagedKVCacheConfig(
            attention_head_count_kv=3,
            block_seq_stride=16,
            device_block_count=2048,
            kv_cache_dtype="float32",
            paged_kv_block_size_elements_per_device=(16,),
        ),
    )


@dataclass
class Simulation:
    """An engine and its clock; `host_s` is the host's time between two invocations."""

    cost: CostModel
    mode: BatchSettings = field(default_factory=BatchSettings)
    max_running: int = 64
    host_s: float = 0.5e-3
    config: ModelConfig = field(default_factory=smollm2_config)

    def __post_init__(self) -> None:
        config = self.config
        self.clock = SimulatedClock()
        self.program = TimedProgram(config, self.cost, self.clock)
        device = FakeDevice(self.program)
        cache = make_cache("trie", config.paged_kv_cache.device_block_count, config.stride)
        slab = device.allocate(
            (config.paged_kv_cache.device_block_count, config.stride), config.paged_kv_cache.dtype
        )
        self.runner = BatchRunner(device, self.program, config, page_table=[slab], clock=self.clock)
        scheduler = Scheduler(cache, make_mode(self.mode, config, self.runner.buckets), self.max_running)
        self.engine = Engine(
            scheduler=scheduler,
            cache=cache,
            runner=self.runner,
            max_seq_len=config.max_seq_len,
            eos_token_ids=frozenset(),
            clock=self.clock,
        )
        self.times_s: dict[str, list[float]] = {}
        self._random = np.random.default_rng(0)

    def add(self, name: str, prompt_tokens: int, output_tokens: int, prefix: Sequence[int] = ()) -> None:
        prompt = [*prefix, *self._random.integers(0, 32, prompt_tokens).tolist()]
        self.times_s[name] = []
        self.engine.add(call(name, prompt, output_tokens))

    def step(self) -> list[Delta]:
        deltas = self.engine.step()
        self.clock.now_s += self.host_s
        for delta in deltas:
            self.times_s[delta.request_id] += [self.clock.now_s] * len(delta.token_ids)
        return deltas

    def run_until(self, done: Callable[[], bool], limit: int = 10_000) -> None:
        while not done():
            self.step()
            limit -= 1
            assert limit, "too many steps"

    def serve(
        self, lengths: Sequence[int], output_tokens: int, clients: int, prefix: Sequence[int] = ()
    ) -> None:
        """Each client sends its next request when the previous one is answered."""
        first = len(self.times_s)
        waiting = deque((str(first + index), length) for index, length in enumerate(lengths))
        for _ in range(min(clients, len(waiting))):
            self.add(*waiting.popleft(), output_tokens, prefix)
        while self.engine.has_work:
            for delta in self.step():
                if delta.finish_reason is not None and waiting:
                    self.add(*waiting.popleft(), output_tokens, prefix)

    def gaps_s(self) -> list[float]:
        return [b - a for times in self.times_s.values() for a, b in pairwise(times)]
