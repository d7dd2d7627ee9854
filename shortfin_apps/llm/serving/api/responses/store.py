"""Stores responses for a while, so that the next request need not send the conversation again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_STORED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and its full input, a list of items; both as JSON."""

    response: bytes
    items: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)


class ResponseStore:
    """Stores at most `max_responses` responses of `max_bytes` in total, each for `ttl_s`.

    Owners cannot access each other's responses. When the store is full, the owner with the most responses
    (or bytes, if bytes are the exceeded limit) loses its oldest, so no owner can evict others by storing
    many. `clock` (seconds) must be monotonic. Expired responses are dropped in the next call.
    """

    def __init__(
        self,
        max_responses: int,
        ttl_s: float,
        clock: Callable[[], float],
        max_bytes: int = MAX_STORED_BYTES,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._ages: dict[tuple[str, str], float] = {}  # time of `put` by owner and id, oldest first
        self._owned: dict[str, dict[str, StoredResponse]] = {}  # by owner and id, oldest first
        self._owned_bytes: dict[str, int] = {}
        self.num_bytes = 0  # of all responses

    @property
    def keeps_any(self) -> bool:
        return self._max_responses > 0

    @property
    def num_responses(self) -> int:
        return len(self._ages)

    def put(self, owner: str, response_id: str, response: StoredResponse) -> bool:
        """Store a response under a new id. Returns False if there is no room for it."""
        self._drop_expired()
        if not self.keeps_any or response.num_bytes > self._max_bytes:
            return False
        assert (owner, response_id) not in self._ages, "ids are random"
        self._ages[owner, response_id] = self._clock()
        self._owned.setdefault(owner, {})[response_id] = response
        self._owned_bytes[owner] = self._owned_bytes.get(owner, 0) + response.num_bytes
        self.num_bytes += response.num_bytes
        while self.num_responses > self._max_responses:
            self._drop_oldest_of(max(self._owned, key=lambda each: len(self._owned[each])))
        while self.num_bytes > self._max_bytes:
            self._drop_oldest_of(max(self._owned_bytes, key=self._owned_bytes.__getitem__))
        return (owner, response_id) in self._ages

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return the response; None if it is missing or another owner's."""
        self._drop_expired()
        return self._owned.get(owner, {}).get(response_id)

    def delete(self, owner: str, response_id: str) -> bool:
        """Delete the response. Returns False if it is missing or another owner's."""
        self._drop_expired()
        if (owner, response_id) not in self._ages:
            return False
        self._drop(owner, response_id)
        return True

    def _drop_expired(self) -> None:
        newest_expired_s = self._clock() - self._ttl_s
        while self._ages:
            (owner, response_id), put_s = next(iter(self._ages.items()))
            if put_s > newest_expired_s:
                return
            self._drop(owner, response_id)

    def _drop_oldest_of(self, owner: str) -> None:
        self._drop(owner, next(iter(self._owned[owner])))

    def _drop(self, owner: str, response_id: str) -> None:
        del self._ages[owner, response_id]
        num_bytes = self._owned[owner].pop(response_id).num_bytes
        self._owned_bytes[owner] -= num_bytes
        self.num_bytes -= num_bytes
        if not self._owned[owner]:
            del self._owned[owner], self._owned_bytes[owner]
