"""Hashes against vLLM's scheme, computed here by hand from its definition."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.kv_events.block_hashes import BlockHashes, announced
from shortfin_apps.llm.components.kvcache.events import PagesPublished


def test_hashes_are_vllms_sha256_cbor() -> None:
    """The bytes are RFC 8949's: an array of 32 bytes, an array of token ids, and the extra keys."""
    root = sha256(b"\x61" + b"7").digest()  # the text "7"
    first = sha256(b"\x83" + b"\x58\x20" + root + b"\x82\x01\x18\x64" + b"\x81\x64salt").digest()
    second = sha256(
        b"\x83" + b"\x58\x20" + first + b"\x82\x19\x03\xe8\x1a\x00\x01\x11\x70" + b"\xf6"
    ).digest()
    hashes = BlockHashes("7")
    assert hashes.add(PagesPublished((1, 2), None, ((1, 100), (1000, 70000)), "salt")) == [first, second]
    assert hashes.parent(PagesPublished((3,), 2, ((1, 2),), None)) == second
    assert announced(first) == int.from_bytes(first[-8:], "big")


PAGES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=4)
SALTS = st.sampled_from([None, "", "a", "b", "ab"])


@given(PAGES, SALTS, PAGES, SALTS)
def test_two_prefixes_have_the_same_hash_only_if_tokens_and_salt_are_the_same(
    pages: list[tuple[int, int]], salt: str | None, others: list[tuple[int, int]], other_salt: str | None
) -> None:
    """So whoever does not know a tenant's salt finds none of its pages."""
    hashes = BlockHashes("0")
    first = hashes.add(PagesPublished(tuple(range(len(pages))), None, tuple(pages), salt))
    second = hashes.add(PagesPublished(tuple(range(10, 10 + len(others))), None, tuple(others), other_salt))
    for index, page_hash in enumerate(first):
        same = salt == other_salt and pages[: index + 1] == others[: index + 1]
        assert (page_hash in second) == same


@given(PAGES, st.integers(1, 3))
def test_a_prefix_has_the_same_hashes_however_it_was_published(
    pages: list[tuple[int, int]], cut: int
) -> None:
    whole, parts = BlockHashes("0"), BlockHashes("0")
    serials = tuple(range(len(pages)))
    expected = whole.add(PagesPublished(serials, None, tuple(pages), "s"))
    found = parts.add(PagesPublished(serials[:cut], None, tuple(pages[:cut]), "s"))
    if len(pages) > cut:
        found += parts.add(PagesPublished(serials[cut:], cut - 1, tuple(pages[cut:]), None))
    assert found == expected


def test_without_a_seed_no_two_processes_have_the_same_hashes() -> None:
    event = PagesPublished((1,), None, ((1, 2),), None)
    assert BlockHashes(None).add(event) != BlockHashes(None).add(event)
    assert BlockHashes("0").add(event) == BlockHashes("0").add(event) != BlockHashes("1").add(event)


def test_removed_pages_take_no_memory() -> None:
    hashes = BlockHashes("0")
    added = hashes.add(PagesPublished((1, 2), None, ((1,), (2,)), None))
    assert hashes.remove((2,)) == [added[1]]
    assert len(hashes) == 1
    hashes.clear()
    assert len(hashes) == 0
