"""Hashes of published pages, equal to vLLM's `sha256_cbor` hashes for prefix caching.

A page's hash is the SHA-256 of the canonical CBOR of [previous page's hash, token IDs, extra keys]. A
prompt's first page uses the hash of the seed as the previous hash, and [cache salt] as the extra keys if
there is a salt. Other pages have no extra keys (vllm/v1/core/kv_cache_utils.py and vllm/utils/hashing.py,
v0.28).
"""

from __future__ import annotations

import os
from hashlib import sha256

import cbor2

from shortfin_apps.llm.components.kvcache.events import PagesPublished

_MASK = (1 << 64) - 1


def hash_cbor(value: object) -> bytes:
    """Return the SHA-256 of a value's canonical CBOR, 32 bytes."""
    return sha256(cbor2.dumps(value, canonical=True)).digest()


def announced(page_hash: bytes) -> int:
    """Return the last 64 bits of a hash as an unsigned integer, vLLM's form of hashes in events."""
    return int.from_bytes(page_hash, "big") & _MASK


class BlockHashes:
    """Hashes of all published pages, by the page's serial number. With `seed` None, the seed is random."""

    def __init__(self, seed: str | None) -> None:
        self._root = os.urandom(32) if seed is None else hash_cbor(seed)
        self._of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._of)

    def parent(self, event: PagesPublished) -> bytes | None:
        """Return the hash of the page before the event's first page; None at the start of a prompt."""
        return None if event.parent is None else self._of[event.parent]

    def add(self, event: PagesPublished) -> list[bytes]:
        """Register the event's newly published pages and return their hashes."""
        last = self.parent(event) or self._root
        extra_keys = None if event.cache_salt is None else (event.cache_salt,)
        hashes: list[bytes] = []
        for serial, token_ids in zip(event.serials, event.token_ids, strict=True):
            last = self._of[serial] = hash_cbor((last, token_ids, extra_keys))
            hashes.append(last)
            extra_keys = None
        return hashes

    def remove(self, serials: tuple[int, ...]) -> list[bytes]:
        """Remove withdrawn pages and return their hashes."""
        return [self._of.pop(serial) for serial in serials]

    def clear(self) -> None:
        self._of.clear()
