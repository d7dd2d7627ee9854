from __future__ import annotations

import pytest

from shortfin_apps.llm.components.invocation.buckets import Buckets
from shortfin_apps.llm.components.kvcache.base import SCRATCH_PAGE
from shortfin_apps.llm.components.runtime.device import EntrySignature
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.tools.bench.roofline.cases import Plan, choose, make_batch, plans
from tests.components.fake_device import fake_config

STRIDE = 4


def buckets(*names: str) -> Buckets:
    return Buckets(
        {name: EntrySignature(name, None, None) for name in names}, STRIDE, has_prefill_position=True
    )


ENTRIES = buckets("decode_bs1", "decode_bs4", "prefill_bs1", "prefill_bs1_s8", "extend")


@pytest.mark.parametrize(("rows", "new_tokens", "context"), [(1, 1, 1), (4, 1, 9), (2, 7, 7), (3, 4, 12)])
def test_rows_do_not_share_pages(rows: int, new_tokens: int, context: int) -> None:
    plan = Plan(EntryFamily.EXTEND, rows, new_tokens, context)
    batch = make_batch(plan, STRIDE)
    pages = [page for task in batch.tasks for page in task.page_ids]
    assert sorted(pages) == list(range(1, 1 + plan.pages(STRIDE)))
    assert SCRATCH_PAGE not in pages
    for task in batch.tasks:
        assert (len(task.token_ids), task.seq_len) == (new_tokens, context)
        assert task.start_position == context - new_tokens
        assert len(task.page_ids) == -(-context // STRIDE)


def test_pages_are_not_in_order() -> None:
    (task,) = make_batch(Plan(EntryFamily.DECODE, 1, 1, 64), STRIDE).tasks
    assert list(task.page_ids) != sorted(task.page_ids)


def test_plans_skip_lengths_beyond_the_context() -> None:
    config = fake_config()
    longest = config.max_seq_len
    found = list(plans(config, [longest, longest + 1], [longest + 1, STRIDE], has_extend=True))
    assert {plan.context for plan in found} == {longest, STRIDE}
    not_planned = {EntryFamily.DECODE_LOOP, EntryFamily.SAMPLE, EntryFamily.ADJUSTED_SAMPLE}
    assert {plan.family for plan in found} == set(EntryFamily) - not_planned
    without = plans(config, [longest], [STRIDE], has_extend=False)
    assert EntryFamily.EXTEND not in {plan.family for plan in without}


def test_the_entry_is_the_one_a_server_would_take() -> None:
    chosen = [
        Plan(EntryFamily.DECODE, 3, 1, 5),
        Plan(EntryFamily.PREFILL, 1, 8, 8),
        Plan(EntryFamily.PREFILL, 1, 12, 12),
    ]
    cases = choose(chosen, ENTRIES, STRIDE, [])
    assert [case.entry for case in cases] == ["decode_bs4", "prefill_bs1_s8", "prefill_bs1"]


def test_patterns_select_entries() -> None:
    chosen = [
        Plan(EntryFamily.DECODE, 1, 1, 5),
        Plan(EntryFamily.PREFILL, 1, 8, 8),
        Plan(EntryFamily.EXTEND, 1, 8, 8),
    ]
    cases = choose(chosen, ENTRIES, STRIDE, ["decode_*", "extend"])
    assert [case.entry for case in cases] == ["decode_bs1", "extend"]
    with pytest.raises(InvalidRequestError, match=r"no entry matches verify; there are decode_bs1, extend"):
        choose(chosen, ENTRIES, STRIDE, ["verify"])
