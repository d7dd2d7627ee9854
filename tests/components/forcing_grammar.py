"""A grammar over the tokens of the fake device that forces some of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.components.fake_device import VOCAB


class Keys:
    """A grammar: any token t, then t % 7 tokens that it forces, then any token, and so on."""

    param = "grammar"

    def matcher(self) -> Keys:
        return self

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
        key = self._key([*generated, *ahead])
        allowed = [not key or i == key[0] for i in range(VOCAB)]
        return np.packbits(allowed, bitorder="little").tobytes()

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        return self._key(generated)

    def _key(self, generated: Sequence[int]) -> list[int]:
        """What is left of the tokens that the last free one forces."""
        start = 0
        while start < len(generated):
            free = generated[start]
            key = [(3 * free + i) % VOCAB for i in range(free % 7)]
            if start + len(key) >= len(generated):
                return key[len(generated) - start - 1 :]
            start += 1 + len(key)
        return []
