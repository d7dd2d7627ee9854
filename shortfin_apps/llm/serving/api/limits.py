"""Limits on one request, checked before any other work on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shortfin_apps.llm.components.request.sampling_params import MAX_LOGPROBS
from shortfin_apps.llm.contract.errors import InvalidRequestError

MAX_CONTAINERS = 20_000  # objects and arrays in one body: a long conversation has a few thousand
MAX_NAMES = 100_000  # keys of all objects in one body
_KEPT = b'"[{:'
_DROPPED = bytes(set(range(256)) - set(_KEPT))

MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 256, 128  # as many are tokenised in milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on one request: the server's settings `max_...`.

    Checks of JSON raise json.JSONDecodeError, all other checks InvalidRequestError. The model's context
    limits a prompt's tokens, and the queue's size limits the number of sequences; neither is checked here.
    """

    body_bytes: int = 4 << 20
    json_depth: int = 32  # nesting of arrays and objects
    prompts: int = 256
    prompt_chars: int = 1_000_000  # in one text prompt, or in all messages together
    n: int = 128
    stops: int = 16
    stop_chars: int = 1024
    logprobs: int = MAX_LOGPROBS

    def check_json_text(self, text: bytes) -> None:
        """Raise json.JSONDecodeError if unparsed JSON has too many containers or names.

        Runs before the parser, because parsing so many containers or names would be slow.
        """
        if (excess := excess_of(text)) is not None:
            raise json.JSONDecodeError(f"it has more than {excess}", "", 0)

    def check_json(self, value: Any) -> None:
        """Raise json.JSONDecodeError if arrays and objects in parsed JSON nest deeper than `json_depth`."""
        level = [value]
        for _ in range(self.json_depth):
            level = [
                inner for outer in level if isinstance(outer, dict | list) for inner in _containers(outer)
            ]
            if not level:
                return
        raise json.JSONDecodeError(f"it nests deeper than {self.json_depth} levels", "", 0)

    def check_prompts(self, prompts: Sequence[object], param: str) -> None:
        """Check the number of prompts, and the length of each text prompt."""
        if len(prompts) > self.prompts:
            raise InvalidRequestError(
                f"`{param}` has {len(prompts)} prompts, but one request may have at most {self.prompts}",
                param,
            )
        for prompt in prompts:
            if isinstance(prompt, str):
                self.check_chars(len(prompt), param)

    def check_chars(self, num_chars: int, param: str) -> None:
        if num_chars > self.prompt_chars:
            raise InvalidRequestError(
                f"`{param}` has {num_chars:,} characters, but a prompt may have at most"
                f" {self.prompt_chars:,}",
                param,
            )

    def check_choices(
        self, n: int | None, best_of: int, stop: str | list[str] | None, prefix: str = ""
    ) -> None:
        """Check `n`, `best_of` and `stop`; their names in the body begin with `prefix`."""
        for name, count in ((f"{prefix}n", n), (f"{prefix}best_of", best_of)):
            if count is not None and not 1 <= count <= self.n:
                raise InvalidRequestError(f"`{name}` must lie in [1, {self.n}]", name)
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > self.stops:
            raise InvalidRequestError(
                f"`{prefix}stop` has {len(stops)} strings, but may have at most {self.stops}", prefix + "stop"
            )
        if not all(0 < len(string) <= self.stop_chars for string in stops):
            raise InvalidRequestError(
                f"`{prefix}stop`: a stop string must have 1 to {self.stop_chars} characters", prefix + "stop"
            )

    def check_bad_words(self, words: Sequence[str], prefix: str = "") -> None:
        """Check the number and the lengths of `bad_words`, because the event loop tokenises all at once."""
        param = prefix + "bad_words"
        if len(words) > MAX_BAD_WORDS:
            raise InvalidRequestError(
                f"`{param}` has {len(words)} words, but may have at most {MAX_BAD_WORDS}", param
            )
        if not all(0 < len(word) <= MAX_BAD_WORD_CHARS for word in words):
            raise InvalidRequestError(
                f"`{param}`: a word must have 1 to {MAX_BAD_WORD_CHARS} characters", param
            )

    def check_logprobs(self, logprobs: int | None, param: str) -> None:
        if logprobs is not None and not 0 <= logprobs <= self.logprobs:
            raise InvalidRequestError(f"`{param}` must lie in [0, {self.logprobs}]", param)


def excess_of(*texts: bytes) -> str | None:
    """Describe the limit that the JSON strings exceed together; None if they are within limits."""
    containers, names = most_counts_of(b"".join(texts))  # these fast upper bounds nearly always suffice
    if containers <= MAX_CONTAINERS and names <= MAX_NAMES:
        return None
    counted = list(map(counts_of, texts))  # separately: an unterminated string would hide the next `text`
    if sum(each.containers for each in counted) > MAX_CONTAINERS:
        return f"{MAX_CONTAINERS:,} arrays and objects"
    if sum(each.names for each in counted) > MAX_NAMES:
        return f"{MAX_NAMES:,} names in its objects"
    return None


def _containers(outer: dict[str, Any] | list[Any]) -> list[dict[str, Any] | list[Any]]:
    inner = outer.values() if isinstance(outer, dict) else outer
    if set(map(type, inner)).isdisjoint((dict, list)):  # fast path: a million token ids
        return []
    return [value for value in inner if isinstance(value, (dict, list))]


class JsonCounts(NamedTuple):
    """`containers`: arrays and objects; `names`: keys of all objects."""

    containers: int
    names: int


def counts_of(text: bytes) -> JsonCounts:
    """Count the containers and names of a JSON string; of invalid JSON, at least those before the error.

    Linear in the length, in a few passes in C: drop escaped quotes and all characters but the counted ones,
    then split at quotes; every second part is outside of strings.
    """
    escaped_quotes_dropped = text.replace(rb"\\", b"").replace(rb"\"", b"")
    marks = escaped_quotes_dropped.translate(None, _DROPPED).replace(b'""', b"")
    outside = b"".join(marks.split(b'"')[::2])
    names = outside.count(b":")
    return JsonCounts(len(outside) - names, names)


def most_counts_of(text: bytes) -> JsonCounts:
    """Return upper bounds of `counts_of`, faster: characters inside strings are counted, too."""
    return JsonCounts(text.count(b"[") + text.count(b"{"), text.count(b":"))
