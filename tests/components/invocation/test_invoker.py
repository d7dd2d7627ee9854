"""The buffers of entries that allocate nothing: who gets which, and how long they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.components.invocation.invoker import NUM_LATE_SETS, Invoker, owned_bytes
from shortfin_apps.llm.components.runtime.device import DeviceBuffer, EntrySignature, TensorType
from tests.components.fake_device import F32, I64, FakeBuffer, FakePending

IDS = TensorType((4,), I64)
TERMS, TOP = TensorType((3, 4), I64), TensorType((4, 8), F32)
VALUES = TensorType((4, 1, 8), F32)
LOGITS = TensorType((4, 1, 1 << 20), F32)
LOOP = EntrySignature("decode_loop_bs4", None, (IDS, VALUES, LOGITS), workspace_bytes=100)
DECODE = EntrySignature("decode_bs4", None, (VALUES, LOGITS), workspace_bytes=300)
PREFILL = EntrySignature("prefill_bs4_s8", None, (VALUES, LOGITS), workspace_bytes=200)
SAMPLE = EntrySignature("sample_bs4", None, (IDS,), workspace_bytes=10)
LOGPROBS = EntrySignature("logprobs_bs4", None, (TERMS, TOP, IDS), workspace_bytes=10)
EXTEND = EntrySignature("extend", None, (VALUES,))
SIGNATURES = (LOOP, DECODE, PREFILL, SAMPLE, LOGPROBS, EXTEND)


@dataclass
class Recorder:
    """A program and device that note what they are asked for."""

    calls: list[Sequence[DeviceBuffer]] = field(default_factory=list)
    allocated: list[tuple[tuple[int, ...], bool]] = field(default_factory=list)

    @property
    def entries(self) -> Mapping[str, EntrySignature]:
        return {signature.name: signature for signature in SIGNATURES}

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> FakePending:
        self.calls.append(arguments)
        returned = [FakeBuffer(np.zeros(1))] if entry == "extend" else []
        return FakePending(lambda: None, buffers=returned)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any], *, on_host: bool = False) -> FakeBuffer:
        self.allocated.append((shape, on_host))
        return FakeBuffer(np.zeros(1, dtype))


def make() -> tuple[Recorder, Invoker]:
    recorder = Recorder()
    device: Any = recorder
    program: Any = recorder
    return recorder, Invoker(device, program)


def test_an_entry_that_allocates_is_called_as_it_is() -> None:
    recorder, invoker = make()
    argument = FakeBuffer(np.ones(1))
    assert len(invoker.submit("extend", [argument]).wait()) == 1
    assert list(recorder.calls[0]) == [argument]
    assert not recorder.allocated
    assert invoker.num_bytes == 0


def test_results_and_workspace_stand_behind_the_arguments() -> None:
    recorder, invoker = make()
    argument = FakeBuffer(np.ones(1))
    results = invoker.submit("decode_bs4", [argument]).wait()
    assert list(recorder.calls[0][:-1]) == [argument, *results]
    # Logits are too large for the host; the workspace is the largest of all entries'.
    assert recorder.allocated == [((4, 1, 8), True), ((4, 1, 1 << 20), False), ((300,), False)]
    assert invoker.num_bytes == 4 * 8 * 4 + 4 * (1 << 20) * 4 + 300


@pytest.mark.parametrize("place", range(3))
def test_all_results_for_logprobs_are_kept_while_later_steps_are_in_flight(place: int) -> None:
    _, invoker = make()
    *several, again = (invoker.submit("logprobs_bs4", []).wait()[place] for _ in range(NUM_LATE_SETS + 1))
    assert len({id(each) for each in several}) == NUM_LATE_SETS
    assert again is several[0]


@pytest.mark.parametrize("entry", ["decode_loop_bs4", "sample_bs4"])
def test_drawn_tokens_are_kept_while_later_steps_are_in_flight(entry: str) -> None:
    _, invoker = make()
    *several, again = (invoker.submit(entry, []).wait()[0] for _ in range(NUM_LATE_SETS + 1))
    assert len({id(each) for each in several}) == NUM_LATE_SETS
    assert again is several[0]


@pytest.mark.parametrize("entry", ["decode_loop_bs4", "sample_bs4", "logprobs_bs4"])
def test_no_call_writes_what_nobody_has_waited_for(entry: str) -> None:
    """A step with many more rows than the entry calls it many times."""
    _, invoker = make()
    several = [invoker.submit(entry, []) for _ in range(5 * NUM_LATE_SETS)]
    assert len({id(each.results()[0]) for each in several}) == 5 * NUM_LATE_SETS
    first = several[0].wait()[0]
    assert several[0].wait()[0] is first
    again = [invoker.submit(entry, []).results()[0] for _ in range(2)]
    assert again[0] is first
    assert again[1] is not first


def test_entries_with_as_many_rows_share_their_logits() -> None:
    recorder, invoker = make()
    first = invoker.submit("decode_bs4", []).wait()
    assert list(invoker.submit("prefill_bs4_s8", []).wait()) == list(first)
    assert list(invoker.submit("decode_loop_bs4", []).wait())[1:] == list(first)
    assert len(recorder.allocated) == 2 + 1 + NUM_LATE_SETS


def test_a_draw_leaves_the_ids_of_a_step_in_flight_alone() -> None:
    _, invoker = make()
    steps = [invoker.submit("decode_loop_bs4", []).wait()[0] for _ in range(2)]
    drawn = invoker.submit("sample_bs4", []).wait()[0]
    assert all(drawn is not step for step in steps)


def test_what_all_buffers_take_is_known_before_they_are_made() -> None:
    recorder, invoker = make()
    program: Any = recorder
    for entry in recorder.entries:
        invoker.submit(entry, [])
    assert owned_bytes(program.entries) == invoker.num_bytes > 0


def test_one_workspace_serves_all_entries_and_nothing_is_allocated_twice() -> None:
    recorder, invoker = make()
    for _ in range(3):
        invoker.submit("decode_loop_bs4", [])
        invoker.submit("decode_bs4", [])
    assert len({id(call[-1]) for call in recorder.calls}) == 1
    assert len(recorder.allocated) == NUM_LATE_SETS + 2 + 1
