from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.components.invocation.batch_result import BatchResult
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.padding_runs import warm_up
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.runtime.device import DeviceBuffer
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.errors import ArtifactError, DeviceLostError, InvocationError
from tests.components.engine_fixture import call
from tests.components.fake_device import FakeDevice, FakePending, FakeProgram, array_of, fake_config
from tests.components.simulation import AMX, Simulation


class Recorder(FakeProgram):
    """Records the arguments of the last submission instead of running it."""

    arguments: list[np.ndarray]

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> FakePending:
        self.arguments = [array_of(a).copy() for a in arguments]
        rows = len(self.arguments[0])
        results = [
            self.device_buffer(np.zeros((rows, 1, 4))),
            self.device_buffer(np.zeros((rows, 1, 4), int)),
        ]
        return FakePending(lambda: None, buffers=results)

    @staticmethod
    def device_buffer(array: np.ndarray) -> DeviceBuffer:
        return FakeDevice(FakeProgram(fake_config())).upload(array)


def task(tokens: list[int], start: int, pages: list[int]) -> LlmTaskInput:
    return LlmTaskInput(Request(call("r", [1])), tokens, start, start + len(tokens), pages)


def run(batch: Batch, *, has_position: bool = True) -> list[list[object]]:
    config = fake_config(has_prefill_position=has_position)
    program = Recorder(config)
    device = FakeDevice(program)
    slab = device.allocate((32, 4), config.paged_kv_cache.dtype)
    BatchRunner(device, program, config, page_table=[slab]).run(batch)
    assert all(a.dtype == np.int64 for a in program.arguments[:-1])
    assert program.arguments[-1].shape == (32, 4)
    return [a.tolist() for a in program.arguments[:-1]]


def test_prefill_arguments_are_tokens_starts_lens_blocks() -> None:
    """A short chunk behind a long history beside a long chunk: B covers the latest start and S."""
    tasks = (task([1, 2, 3, 4, 5], 0, [7, 8]), task([6, 7], 8, [3, 4, 5]))
    tokens, starts, lens, blocks = run(Batch(EntryFamily.PREFILL, tasks))
    assert tokens == [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7] + [0] * 6, [0] * 8, [0] * 8]
    assert starts == [0, 8, 0, 0]
    assert lens == [5, 10, 1, 1]
    assert blocks == [[7, 8, 0, 0], [3, 4, 5, 0], [0] * 4, [0] * 4]


def test_without_start_positions_s_is_b_times_the_stride() -> None:
    tokens, lens, blocks = run(Batch(EntryFamily.PREFILL, (task([1, 2, 3], 0, [9]),)), has_position=False)
    assert tokens == [[1, 2, 3, 0, 0, 0, 0, 0]]
    assert lens == [3]
    assert blocks == [[9, 0]]


def test_decode_arguments_are_tokens_lens_starts_blocks() -> None:
    tasks = tuple(task([i], 4 * i, list(range(1, i + 2))) for i in (1, 2, 3))
    tokens, lens, starts, blocks = run(Batch(EntryFamily.DECODE, tasks))
    assert tokens == [[1], [2], [3], [0]]
    assert lens == [5, 9, 13, 1]
    assert starts == [4, 8, 12, 0]
    assert blocks == [[1, 2, 0, 0], [1, 2, 3, 0], [1, 2, 3, 4], [0] * 4]


def test_warm_up_runs_every_entry_on_the_scratch_page_alone() -> None:
    config = fake_config()
    program = FakeProgram(config, static_lengths=(8,), loop_sizes=(2,))
    device = FakeDevice(program)
    slab = device.allocate((32, 4), config.paged_kv_cache.dtype)
    warm_up(BatchRunner(device, program, config, page_table=[slab]))
    assert {name for name, _ in program.calls} == set(program.entries)
    assert not slab.array[1:].any()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (InvocationError("the shapes mismatch"), "config.json may belong to another VMFB"),
        (DeviceLostError("out of memory; restart with fewer --pages"), "first run: out of memory; restart"),
    ],
)
def test_a_warm_up_that_fails_says_whose_fault_it_may_be(error: InvocationError, says: str) -> None:
    config = fake_config()
    program = FakeProgram(config)
    device = FakeDevice(program)
    slab = device.allocate((32, 4), config.paged_kv_cache.dtype)

    def fail(entry: str) -> None:
        raise error

    program.faults.before = fail
    kind = DeviceLostError if isinstance(error, DeviceLostError) else ArtifactError
    with pytest.raises(kind, match=says):
        warm_up(BatchRunner(device, program, config, page_table=[slab]))


@pytest.mark.parametrize("place", [0, 1, 3])
def test_values_are_nan_when_one_of_them_is(place: int) -> None:
    """NaN need not come first in the values of another compiler's program."""
    values = np.arange(8, 0, -1, dtype=np.float16).reshape(2, 1, 4)
    values[1, 0, place] = np.nan
    tasks = (task([1], 0, [3]), task([2], 0, [4]))
    result = BatchResult(Batch(EntryFamily.DECODE, tasks), values, np.zeros((2, 1, 4), np.int64), None)
    assert result.row(0, with_logits=False).best == 8
    assert np.isnan(result.row(1, with_logits=False).best)


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
def test_few_steps_of_a_steady_decode_upload_a_block_table(mode: BatchModeName) -> None:
    """Pages hold 16 tokens, and all rows grow at the same step."""
    simulation = Simulation(AMX, BatchSettings(batch_mode=mode))
    for client in range(8):
        simulation.add(str(client), 128 + client, 256)
    simulation.run_until(lambda: all(simulation.times_s.values()))  # all have a token: they decode
    before = simulation.engine.stats()
    for _ in range(200):
        simulation.step()
    after = simulation.engine.stats()
    assert after.steps - before.steps == 200
    assert after.block_tables.rows_joined == before.block_tables.rows_joined
    assert after.block_tables.uploads - before.block_tables.uploads <= 0.07 * 200


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize(
    ("prompts", "output_tokens"),
    [([128] * 8, 128), (list(range(16, 513, 16)), 64)],
    ids=["W2", "W3"],
)
def test_a_row_of_the_block_tables_is_filled_once_per_request(
    mode: BatchModeName, prompts: list[int], output_tokens: int
) -> None:
    """Prefills beside decodes, arrivals, departures and preemptions join no row anew."""
    simulation = Simulation(AMX, BatchSettings(batch_mode=mode))
    simulation.serve(prompts, output_tokens, clients=len(prompts))
    stats = simulation.engine.stats()
    assert stats.block_tables.rows_joined == len(prompts) + stats.preemptions


def test_counts_stay_as_they_were_when_they_were_asked_for() -> None:
    config = fake_config()
    program = Recorder(config)
    device = FakeDevice(program)
    slab = device.allocate((32, 4), config.paged_kv_cache.dtype)
    runner = BatchRunner(device, program, config, page_table=[slab])
    prefill = Batch(EntryFamily.PREFILL, (task([1, 2, 3], 0, [7]),))
    decode = Batch(EntryFamily.DECODE, (task([4], 3, [7]),))
    seen = []
    for batch in (prefill, decode, decode, prefill):
        runner.run(batch)
        seen.append(runner.counts())
    assert [{name: c.invocations for name, c in counts.items()} for counts in seen] == [
        {"prefill_bs1": 1},
        {"prefill_bs1": 1, "decode_bs1": 1},
        {"prefill_bs1": 1, "decode_bs1": 2},
        {"prefill_bs1": 2, "decode_bs1": 2},
    ]


@pytest.mark.parametrize(("all_windowed", "cleared"), [(False, [[0, 1, 2], [0, 3]]), (True, [[0, 3]])])
def test_pages_are_cleared_in_the_slab_that_has_them(all_windowed: bool, cleared: list[list[int]]) -> None:
    """Where all layers have a window, other pages are names alone."""
    config = fake_config(pages=5, window=9, all_windowed=all_windowed)
    device = FakeDevice(FakeProgram(config))
    slabs = [device.upload(np.ones((5, config.stride), np.float32)) for _ in config.page_elements]
    BatchRunner(device, device.program, config, page_table=slabs).clear_pages({1, 2}, {3})
    for slab, page_ids in zip(slabs, cleared, strict=True):
        zeroed = np.flatnonzero((device.download(slab) == 0).all(axis=1))
        assert zeroed.tolist() == page_ids
