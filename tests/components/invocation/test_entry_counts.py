from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.invocation.entry_counts import BOUNDS, Distribution, EntryCounts
from shortfin_apps.llm.contract.abi import EntryClass


@given(st.lists(st.integers(0, 2**14)))
def test_a_bin_counts_sizes_up_to_its_bound(sizes: list[int]) -> None:
    distribution = Distribution()
    for size in sizes:
        distribution.add(size)
    up_to = [sum(size <= bound for size in sizes) for bound in BOUNDS]
    assert list(accumulate(distribution.bins)) == [*up_to, len(sizes)]
    assert distribution.total == sum(sizes)


def test_an_invocation_of_prefills_and_decodes() -> None:
    counts = EntryCounts(EntryClass.STATIC)
    counts.add([1, 1, 1, 128, 64], rows=208)
    assert (counts.invocations, counts.tasks.total, counts.padded_tokens) == (1, 5, 13)
    assert (counts.prefill_tokens.total, counts.decode_tokens.total) == (192, 3)


def test_a_copy_does_not_change() -> None:
    counts = EntryCounts(EntryClass.STATIC)
    counts.add([1], rows=1)
    copy = counts.copy()
    counts.add([5], rows=8)
    assert (copy.invocations, copy.tasks.total, copy.prefill_tokens.total, copy.padded_tokens) == (1, 1, 0, 0)
    assert sum(copy.decode_tokens.bins) == 1
