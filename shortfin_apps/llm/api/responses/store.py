"""The responses that are kept for a while, so that the next request need not send the conversation again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_STORED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and its whole input, each as JSON; the input is a list of items."""

    response: bytes
    items: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)


class ResponseStore:
    """At most `max_responses` responses of `max_bytes` together, each for `ttl_s` after it was put.

    An owner has no access to another's. When there is no room, the owner with the most responses, or the
    most bytes if it is these that are too many, loses its oldest: nobody drives out others' by storing many.
    `clock` (seconds) does not go back. What has expired is dropped in the next call.
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
        self._ages: dict[tuple[str, str], float] = {}  # when each was put, oldest first, by owner and id
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
        """Keeps a response under an id that was not used before. False if there is no room for it."""
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
        """None if it is not there, or not the owner's."""
        self._drop_expired()
        return self._owned.get(owner, {}).get(response_id)

    def delete(self, owner: str, response_id: str) -> bool:
        """False if it is not there, or not the owner's."""
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
