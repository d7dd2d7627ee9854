"""A subscriber of KV events as vLLM's and llm-d's are: SUB for what comes, DEALER for what was missed.

`index` follows the events as llm-d's indexer does: it has the token ids from a prompt's beginning, and the
salt, of each block that is stored, by its announced hash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq

PATIENCE_MS = 10_000  # it takes milliseconds

Content = tuple[tuple[object, ...] | None, tuple[int, ...]]  # extra keys of the first block, and all tokens


@dataclass
class Index:
    """Applies events by the fields' positions, and refuses what llm-d's adapter would."""

    page_tokens: int
    stored: dict[int, Content] = field(default_factory=dict)

    def apply(self, batch: bytes) -> None:
        time_s, events, rank = msgpack.unpackb(batch)
        assert isinstance(time_s, float)
        assert rank == 0
        for name, *fields in events:
            getattr(self, f"_{name}")(*fields)

    def _BlockStored(
        self,
        hashes: list[int],
        parent: int | None,
        token_ids: list[int],
        block_size: int,
        lora_id: None,
        medium: str,
        lora_name: None,
        extra_keys: list[Any] | None,
    ) -> None:
        assert (block_size, lora_id, medium, lora_name) == (self.page_tokens, None, "GPU", None)
        assert len(token_ids) == len(hashes) * block_size > 0
        assert extra_keys is None or (len(extra_keys) == len(hashes) and not any(extra_keys[1:]))
        salt = tuple(extra_keys[0]) if extra_keys else None
        tokens: tuple[int, ...] = ()
        if parent is not None:
            assert extra_keys is None
            salt, tokens = self.stored[parent]
        for index, block_hash in enumerate(hashes):
            assert 0 <= block_hash < 1 << 64
            tokens = (*tokens, *token_ids[index * block_size : (index + 1) * block_size])
            assert block_hash not in self.stored
            self.stored[block_hash] = (salt, tokens)

    def _BlockRemoved(self, hashes: list[int], medium: str) -> None:
        assert medium == "GPU"
        for block_hash in hashes:
            del self.stored[block_hash]

    def _AllBlocksCleared(self) -> None:
        self.stored.clear()


class Subscriber:
    def __init__(
        self, endpoint: str, replay_endpoint: str | None, topic: str = "", receive_batches: int = 1000
    ) -> None:
        self._context = zmq.Context()
        self.live = self._context.socket(zmq.SUB)
        self.live.setsockopt(zmq.RCVHWM, receive_batches)
        self.live.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.live.connect(endpoint)
        self.dealer = self._context.socket(zmq.DEALER)
        if replay_endpoint is not None:
            self.dealer.connect(replay_endpoint)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def receive(self) -> tuple[bytes, int, bytes]:
        """The next message: topic, sequence number, batch."""
        assert self.live.poll(PATIENCE_MS), "no message came"
        topic, number, batch = self.live.recv_multipart()
        assert len(number) == 8
        return topic, int.from_bytes(number, "big"), batch

    def replay(self, sequence: int) -> list[tuple[bytes, int, bytes]]:
        """All messages since this sequence number that the publisher still has."""
        self.dealer.send_multipart([b"", sequence.to_bytes(8, "big")])
        found: list[tuple[bytes, int, bytes]] = []
        while True:
            assert self.dealer.poll(PATIENCE_MS), "the replay does not end"
            empty, topic, number, batch = self.dealer.recv_multipart()
            assert empty == b""
            if not batch:
                assert (topic, number) == (b"", b"\xff" * 8)
                return found
            found.append((topic, int.from_bytes(number, "big"), batch))
