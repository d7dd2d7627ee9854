from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.kv_events.replay_buffer import ReplayBuffer


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 6), st.integers(1, 40), st.integers(-1, 32))
def test_the_last_batches_are_kept_within_both_bounds(
    sizes: list[int], max_batches: int, max_bytes: int, sequence: int
) -> None:
    buffer = ReplayBuffer(max_batches, max_bytes)
    for number, size in enumerate(sizes):
        buffer.append(number, bytes(size))
    expected = [(number, bytes(size)) for number, size in enumerate(sizes)]
    while len(expected) > 1 and (
        len(expected) > max_batches or sum(len(batch) for _, batch in expected) > max_bytes
    ):
        expected.pop(0)
    assert list(buffer.since(0)) == expected
    assert list(buffer.since(sequence)) == [entry for entry in expected if entry[0] >= sequence]
