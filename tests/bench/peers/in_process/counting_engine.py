"""An engine whose tokens count upwards from the last one of the prompt."""

from __future__ import annotations

from collections.abc import Sequence


class CountingEngine:
    """Adds one token to every request in each step."""

    def __init__(self, quiet_s: float = 0.0, fails_with: Exception | None = None) -> None:
        self.quiet_s = quiet_s
        self.batch_sizes: list[int] = []
        self._fails_with = fails_with
        self._last: dict[int, int] = {}
        self._left_tokens: dict[int, int] = {}

    def add(self, key: int, prompt_token_ids: Sequence[int], max_tokens: int) -> None:
        self._last[key], self._left_tokens[key] = prompt_token_ids[-1], max_tokens

    def step(self) -> list[tuple[int, int]]:
        if self._fails_with is not None:
            raise self._fails_with
        keys = [key for key, left in self._left_tokens.items() if left]
        self.batch_sizes.append(len(keys))
        for key in keys:
            self._last[key] += 1
            self._left_tokens[key] -= 1
        return [(key, self._last[key]) for key in keys]

    def is_busy(self) -> bool:
        return any(self._left_tokens.values())
