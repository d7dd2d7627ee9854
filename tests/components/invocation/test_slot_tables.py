"""The host passes counts of tokens to the device exactly where the device's table has others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.invocation.slot_tables import SlotTables, table_bytes
from shortfin_apps.llm.components.kvcache.lease import Lease
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.abi import num_places
from tests.components.engine_fixture import call
from tests.components.fake_device import VOCAB, FakeDevice, FakeProgram, fake_config


def tables(num_slots: int, *, adjusts: bool = True) -> SlotTables:
    program = program_of(adjusts=adjusts)
    made = SlotTables(FakeDevice(program), program.entries)
    made.resize(num_slots)
    return made


def program_of(*, adjusts: bool = True) -> FakeProgram:
    sizes = (2, 4) if adjusts else ()
    return FakeProgram(fake_config(), sample_sizes=(4,), adjusted_sample_sizes=sizes)


def started(slot: int, token_ids: list[int]) -> Request:
    request = Request(call("a", token_ids, 40))
    request.start(Lease(), slot)
    return request


def next_task(request: Request) -> LlmTaskInput:
    end = len(request.token_ids)
    return LlmTaskInput(request, request.token_ids[-1:], end - 1, end, [])


def test_there_are_counts_only_if_an_entry_takes_them() -> None:
    assert {name: each.shape for name, each in tables(7).buffers.items()} == {
        "last_tokens": (num_places(7),),
        "counts": (7, VOCAB),
    }
    assert set(tables(7, adjusts=False).buffers) == {"last_tokens"}
    assert table_bytes(program_of().entries, 7) == 8 * num_places(7) + 7 * 4 * VOCAB
    assert table_bytes(program_of(adjusts=False).entries, 7) == 8 * num_places(7)


def test_counts_are_passed_for_the_first_draw_and_after_tokens_that_the_device_did_not_draw() -> None:
    made, request = tables(3), started(2, [5, 6, 5])
    seen = made.count_next(next_task(request))
    assert seen is not None
    assert dict(zip(seen.token_ids, seen.counts, strict=True)) == {5: 0, 6: 0}
    for token_id in (6, 9):
        request.token_ids.append(token_id)
        assert made.count_next(next_task(request)) is None
    request.token_ids += [9, 7]  # the first was drawn, the second was forced
    seen = made.count_next(next_task(request))
    assert seen is not None
    assert dict(zip(seen.token_ids, seen.counts, strict=True)) == {5: 0, 6: 1, 9: 2, 7: 1}


def test_draws_of_tokens_that_the_host_does_not_know_need_no_counts() -> None:
    made, request = tables(3), started(0, [5, 6])
    task = next_task(request)
    made.count_next(task)
    for _ in range(3):
        task = task.following()
        assert made.count_next(task) is None


@given(st.lists(st.sampled_from(["draw", "restart", "other", "forget"]), max_size=12))
def test_a_table_is_trusted_only_while_the_same_start_of_a_request_draws(acts: list[str]) -> None:
    made, request = tables(1), started(0, [1])
    is_counted = False
    for act in acts:
        match act:
            case "draw":
                assert (made.count_next(next_task(request)) is None) is is_counted
                request.token_ids.append(3)
                is_counted = True
            case "restart":
                request.lease, is_counted = Lease(), False
            case "other":
                made.count_next(next_task(started(0, request.token_ids)))
                is_counted = False
            case "forget":
                made.forget()
                is_counted = False


def test_programs_may_have_one_table_of_tokens() -> None:
    model, draft = tables(3), tables(3)
    draft.use_tokens_of(model)
    assert draft.buffers["last_tokens"] is model.buffers["last_tokens"]
    assert draft.buffers["counts"] is not model.buffers["counts"]
    assert draft.drafted_place(2, 5) == model.drafted_place(2, 5)
