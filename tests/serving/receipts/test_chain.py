from __future__ import annotations

import struct
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.receipts.chain import Chain

LINKS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(width=32, allow_nan=False)), max_size=9)


def chain(links: list[tuple[int, float]], start: object = "start") -> Chain:
    made = Chain(start)
    for token_id, logit in links:
        made.add(token_id, logit)
    return made


def test_is_the_documented_rule() -> None:
    end = blake2b(b'{"a":1}', digest_size=16).digest()
    marks = b""
    for token_id, logit in [(7, 0.5), (300, -1.25)]:
        end = blake2b(end + struct.pack("<i", token_id) + struct.pack("<f", logit), digest_size=16).digest()
        marks += end[:1]
    made = chain([(7, 0.5), (300, -1.25)], {"a": 1.0})
    assert (made.end, made.marks) == (end, marks)


@given(LINKS, LINKS)
def test_equal_ends_are_of_equal_links(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> None:
    same = [(i, struct.pack("<f", x)) for i, x in one] == [(i, struct.pack("<f", x)) for i, x in other]
    assert (chain(one).end == chain(other).end) is same


@given(LINKS)
def test_the_last_bit_of_a_logit_counts(links: list[tuple[int, float]]) -> None:
    changed = [*links, (1, 12.0)], [*links, (1, struct.unpack("<f", struct.pack("<I", 0x41400001))[0])]
    assert chain(changed[0]).end != chain(changed[1]).end
    assert chain(changed[0]).marks[:-1] == chain(changed[1]).marks[:-1]


@given(LINKS)
def test_the_start_counts(links: list[tuple[int, float]]) -> None:
    assert chain(links, "other").end != chain(links).end
