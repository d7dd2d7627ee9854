"""Encodes changes of the published pages as vLLM's KV events.

A batch is the msgpack array [time, events, data-parallel rank]. An event is an array of the event's name and
its fields in vLLM's order (vllm/distributed/kv_events.py). vLLM itself has written events as maps since
v0.28. llm-d's router and smg read both forms; older subscribers read only arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from shortfin_apps.llm.components.kv_events.block_hashes import BlockHashes, announced
from shortfin_apps.llm.components.kvcache.events import AllPages, PageEvent, PagesPublished, PagesWithdrawn

MEDIUM = "GPU"  # vLLM's name for the memory that the device computes from, as opposed to offloaded pages
RANK = 0
_LORA_ID = _LORA_NAME = None


class EventEncoder:
    """Encodes batches of events. Callers must pass every event, in order.

    The encoder keeps the hashes of the published pages, which later events refer to.
    """

    def __init__(self, page_tokens: int, hash_seed: str | None) -> None:
        self._page_tokens = page_tokens
        self._hashes = BlockHashes(hash_seed)

    def encode(self, time_s: float, events: Sequence[PageEvent]) -> bytes:
        """Encode a batch of events; `time_s` is Unix time."""
        written = [message for event in events for message in self._messages(event)]
        return msgspec.msgpack.encode([time_s, written, RANK])

    def _messages(self, event: PageEvent) -> Iterator[list[object]]:
        if isinstance(event, PagesPublished):
            yield self._stored(event)
        elif isinstance(event, PagesWithdrawn):
            yield ["BlockRemoved", [announced(each) for each in self._hashes.remove(event.serials)], MEDIUM]
        else:
            yield from self._all(event)

    def _all(self, event: AllPages) -> Iterator[list[object]]:
        self._hashes.clear()
        yield ["AllBlocksCleared"]
        for published in event.published:
            yield self._stored(published)

    def _stored(self, event: PagesPublished) -> list[object]:
        parent = self._hashes.parent(event)
        extra_keys = None
        if event.cache_salt is not None:
            extra_keys = [[event.cache_salt], *[None] * (len(event.serials) - 1)]
        return [
            "BlockStored",
            [announced(each) for each in self._hashes.add(event)],
            None if parent is None else announced(parent),
            [token_id for token_ids in event.token_ids for token_id in token_ids],
            self._page_tokens,
            _LORA_ID,
            MEDIUM,
            _LORA_NAME,
            extra_keys,
        ]
