"""The chain of an answer: a digest over its tokens and logits, in which each link includes the previous one.

    h_0 = H(canonical JSON of what determines the answer)
    h_i = H(h_{i-1}, token id i as int32, its logit as float32), both little-endian

H is blake2b with 16 bytes. Two chains with equal ends therefore have the same tokens with bit-identical
logits. Their marks, the first byte of each link, show where two chains diverge.
"""

from __future__ import annotations

import struct

from shortfin_apps.llm.serving.receipts.encoding import canonical_json, digest

_LINK = struct.Struct("<if")


class Chain:
    """A chain that begins with `start`, a JSON value. `end` is the last link."""

    def __init__(self, start: object) -> None:
        self.end = digest(canonical_json(start))
        self._marks = bytearray()

    def add(self, token_id: int, logit: float) -> None:
        """Adds the answer's next token; `logit` is an f32."""
        self.end = digest(self.end, _LINK.pack(token_id, logit))
        self._marks.append(self.end[0])

    @property
    def marks(self) -> bytes:
        """One byte per token."""
        return bytes(self._marks)
