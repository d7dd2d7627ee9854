"""The chain of an answer: a digest over its tokens and their logits, in which each link holds the one before.

    h_0 = H(canonical JSON of what determines the answer)
    h_i = H(h_{i-1}, token id i as int32, its logit as float32), both with the lowest byte first

H is blake2b with 16 bytes. So two chains that are equal at their end are of the same tokens, whose logits
have the same bits; where they part is told by their marks, the first byte of each link.
"""

from __future__ import annotations

import struct

from shortfin_apps.llm.receipts.encoding import canonical_json, digest

_LINK = struct.Struct("<if")


class Chain:
    """Begins with `start`, which JSON can write. `end` is the last link."""

    def __init__(self, start: object) -> None:
        self.end = digest(canonical_json(start))
        self._marks = bytearray()

    def add(self, token_id: int, logit: float) -> None:
        """The next token of the answer; `logit` is an f32."""
        self.end = digest(self.end, _LINK.pack(token_id, logit))
        self._marks.append(self.end[0])

    @property
    def marks(self) -> bytes:
        """A byte for each token."""
        return bytes(self._marks)
