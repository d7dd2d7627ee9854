"""Incremental detokenising: token ids to text, without incomplete characters or partial stop strings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from shortfin_apps.llm.serving.text.tokenizer import REPLACEMENT, Tokenizer

MAX_WINDOW = 16  # maximum number of tokens decoded at once; only reached in a run of invalid UTF-8
MAX_PROMPT_WINDOW = MAX_WINDOW // 2  # maximum number of prompt tokens in the window
UTF8_TOKENS = 4  # enough for an incomplete character (up to three bytes) and one token before it


class Detokenizer:
    """Decodes the tokens after a prompt one by one, each together with only a few tokens before it.

    A decoder needs context (SentencePiece drops a leading space at the start of a text; a character may span
    tokens). Therefore the last settled tokens (their text was returned, or they are from the prompt) are
    decoded again together with the new tokens:

        window:  | settled, decoded for context | new, not settled |
        text:    | ............ sent .......... |  next piece ...  | U+FFFD: maybe a partial character |

    A character that begins in the prompt's last tokens and ends after them is part of the new text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Start after the prompt. `shown_ids`: special tokens to decode even with `skip_special_tokens`."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset[int]()
        settled, unfinished = self._end_of(prompt_token_ids)
        self._window = settled + unfinished
        self._context_len = len(settled)  # number of settled tokens in the window
        text = self._decode(self._window)
        # Number of characters of the decoded window that were returned or are the prompt's.
        self._sent = max(len(self._decode(settled)), len(text.rstrip(REPLACEMENT)))
        self._prompt_replacements = len(text) - self._sent  # U+FFFD of an incomplete character in the prompt

    def push(self, token_id: int) -> str:
        """Return the text completed by this token; often one word, sometimes empty."""
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            piece = text[self._sent :]
            if piece or len(self._window) >= MAX_WINDOW:
                self._settle(keep=len(self._window) - self._context_len, unsettled_chars=0)
        elif len(self._window) >= MAX_WINDOW:
            # Too many tokens for one incomplete character: only the last U+FFFD may still change.
            piece = text[self._sent : -1]
            self._settle(keep=UTF8_TOKENS, unsettled_chars=1)
        else:
            end = len(text.rstrip(REPLACEMENT))
            piece = text[self._sent : end]
            self._sent = max(self._sent, end)
        return self._without_prompt_replacements(piece)

    def finish(self) -> str:
        """Return the held-back text; an incomplete character becomes U+FFFD."""
        piece = self._without_prompt_replacements(self._decode(self._window)[self._sent :])
        self._window.clear()
        self._context_len = self._sent = self._prompt_replacements = 0
        return piece

    def _end_of(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the last few tokens that end with a complete character, and the tokens after these."""
        with_text = filter(self._has_text, reversed(prompt_token_ids))
        last = list(itertools.islice(with_text, MAX_PROMPT_WINDOW + UTF8_TOKENS - 1))[::-1]
        for end in range(len(last), max(len(last) - UTF8_TOKENS, -1), -1):
            for start in range(max(end - 1, 0), max(end - MAX_PROMPT_WINDOW, 0) - 1, -1):
                text = self._decode(last[start:end])
                if REPLACEMENT not in (text[:1], text[-1:]) and (text or start == 0):
                    return last[start:end], last[end:]
        return last[-UTF8_TOKENS:], []  # invalid UTF-8

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped and token_id in self._tokenizer.token_ids

    def _without_prompt_replacements(self, piece: str) -> str:
        while self._prompt_replacements and piece.startswith(REPLACEMENT):
            piece = piece[1:]
            self._prompt_replacements -= 1
        if piece:
            self._prompt_replacements = 0
        return piece

    def _settle(self, keep: int, unsettled_chars: int) -> None:
        self._window = self._window[-keep:]
        self._context_len = len(self._window)
        self._sent = len(self._decode(self._window)) - unsettled_chars

    def _decode(self, token_ids: list[int]) -> str:
        if len(token_ids) == 1:
            return self._tokenizer.lone_text(token_ids[0])
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class StopMatcher:
    """Finds stop strings in a text; holds text back while it may be the beginning of one.

    Of several matches, the one that ends first counts; of matches with the same end, the longest. Therefore
    the result does not depend on how the text is split into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_match: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._include_match = include_match
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Return the new text that is before any stop string: up to a match, and "" after a match.

        With `include_match`, the matched stop string is returned, too.
        """
        if not self._stops:
            return piece
        if self.matched is not None:
            return ""
        text = self._held + piece
        if (match := self._find(text)) is not None:
            start, end = match
            self.matched, self._held = text[start:end], ""
            return text[: end if self._include_match else start]
        split = len(text) - self._undecided(text)
        self._held = text[split:]
        return text[:split]

    def finish(self) -> str:
        """Return the held-back text, which was not a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, int] | None:
        """Return start and end of the first match, or None.

        A match must end after the held-back text, which has been searched before.
        """
        first_end = len(self._held) + 1
        starts = ((text.find(stop, max(0, first_end - len(stop))), len(stop)) for stop in self._stops)
        matches = [(start + length, start) for start, length in starts if start >= 0]
        return min(matches)[::-1] if matches else None

    def _undecided(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
