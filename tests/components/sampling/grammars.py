"""Grammars that tests write down as the tokens that they allow."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.contract.errors import ConstraintError


class Allowing:
    """A grammar, and the matcher of each request, that allows the same tokens always."""

    param = "grammar"

    def __init__(self, *token_ids: int) -> None:
        self._bitmask = bytes([sum(1 << token_id for token_id in token_ids)])

    def matcher(self) -> Allowing:
        return self

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
        return self._bitmask

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        return ()


class Failing(Allowing):
    """Fails when it is asked."""

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
        raise ConstraintError("the grammar failed")


class Repeating(Allowing):
    """Allows the last token again, and the one behind it."""

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
        last = [0, *generated, *ahead][-1]
        return bytes([3 << last & 0xFF])


class Forcing(Allowing):
    """Any token, then the given ones."""

    def __init__(self, *token_ids: int) -> None:
        self._token_ids = token_ids

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
        return bytes([1 << self.forced([*generated, *ahead])[0]])

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        return self._token_ids[len(generated) - 1 :]
