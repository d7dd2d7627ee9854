"""The most that one request may ask for, checked before work is done for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shortfin_apps.llm.components.request.sampling_params import MAX_LOGPROBS
from shortfin_apps.llm.errors import InvalidRequestError

MAX_CONTAINERS = 20_000  # objects and arrays in one body: a long conversation has some thousands


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Each is a setting of the server, `max_` before its name; every check raises InvalidRequestError.

    A prompt's tokens and the number of sequences are not here: the model's context and the queue's
    places bound them.
    """

    body_bytes: int = 4 << 20
    json_depth: int = 32  # arrays and objects inside each other
    prompts: int = 256
    prompt_chars: int = 1_000_000  # of one text, or of all messages together
    n: int = 128
    stops: int = 16
    stop_chars: int = 1024
    logprobs: int = MAX_LOGPROBS

    def check_json(self, value: Any) -> None:
        """Raises json.JSONDecodeError, as the parser does, for what nests too deep or has too many parts."""
        level, containers = [value], 0
        for _ in range(self.json_depth):
            level = [
                inner for outer in level if isinstance(outer, dict | list) for inner in _containers(outer)
            ]
            containers += len(level)
            if containers > MAX_CONTAINERS:
                raise json.JSONDecodeError(f"it has more than {MAX_CONTAINERS:,} arrays and objects", "", 0)
            if not level:
                return
        raise json.JSONDecodeError(f"it nests deeper than {self.json_depth} levels", "", 0)

    def check_prompts(self, prompts: Sequence[str | Sequence[int]], param: str) -> None:
        """A batch, of texts or of token ids."""
        if len(prompts) > self.prompts:
            raise InvalidRequestError(
                f"`{param}` has {len(prompts)} prompts, but one request may have {self.prompts}", param
            )
        for prompt in prompts:
            if isinstance(prompt, str):
                self.check_chars(len(prompt), param)

    def check_chars(self, num_chars: int, param: str) -> None:
        if num_chars > self.prompt_chars:
            raise InvalidRequestError(
                f"`{param}` has {num_chars:,} characters, but a prompt may have {self.prompt_chars:,}", param
            )

    def check_choices(self, n: int | None, stop: str | list[str] | None, prefix: str = "") -> None:
        """`n` and `stop`, whose names in the body begin with `prefix`."""
        if n is not None and not 1 <= n <= self.n:
            raise InvalidRequestError(f"`{prefix}n` must lie in [1, {self.n}]", prefix + "n")
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > self.stops:
            raise InvalidRequestError(
                f"`{prefix}stop` has {len(stops)} strings, but may have {self.stops}", prefix + "stop"
            )
        if not all(0 < len(string) <= self.stop_chars for string in stops):
            raise InvalidRequestError(
                f"`{prefix}stop`: a stop string has 1 to {self.stop_chars} characters", prefix + "stop"
            )

    def check_logprobs(self, logprobs: int | None, param: str) -> None:
        if logprobs is not None and not 0 <= logprobs <= self.logprobs:
            raise InvalidRequestError(f"`{param}` must lie in [0, {self.logprobs}]", param)


def _containers(outer: dict[str, Any] | list[Any]) -> list[dict[str, Any] | list[Any]]:
    inner = outer.values() if isinstance(outer, dict) else outer
    if set(map(type, inner)).isdisjoint((dict, list)):  # at once: a million token ids have none
        return []
    return [value for value in inner if isinstance(value, (dict, list))]
