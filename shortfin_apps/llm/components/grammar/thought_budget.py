"""A limit on the tokens of a model's reasoning, enforced by forcing the text that ends the reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLTokenizer

from shortfin_apps.llm.components.request.grammar import Bitmask, GrammarMatcher
from shortfin_apps.llm.contract.errors import ConstraintError

WHITE_SPACE = " \n\r\t"
MAX_CHAR_BYTES = 4  # of UTF-8; a token has at least one


@dataclass(frozen=True, slots=True)
class ThoughtBudget:
    """The budget of the reasoning at the beginning of an output.

    `begins`: texts that may begin the reasoning, after white space; empty if the output begins inside it.
    `ends`: texts that end the reasoning; the first one is forced. `max_tokens` counts the tokens between.
    """

    max_tokens: int
    begins: tuple[str, ...]
    ends: tuple[str, ...]


class BudgetedMatcher:
    """Implements GrammarMatcher: forces the end of the reasoning when its budget is spent.

    Otherwise the request's grammar, `matcher`, decides; it must allow the end anywhere in the reasoning. If
    the last token of the budget ends within a character, the character is completed first.
    """

    def __init__(self, matcher: GrammarMatcher, budget: ThoughtBudget, tokenizer: LLTokenizer) -> None:
        self._matcher = matcher
        self._budget = budget
        self._tokenizer = tokenizer
        self._begin: int | None = None if budget.begins else 0  # the reasoning's first place in the output
        self._is_over = False  # no end can be forced any more
        self._num_bytes = -(-tokenizer.vocab_size // 32) * 4  # length of the library's bitmasks

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> Bitmask:
        token_ids = [*generated, *ahead]
        forced = self._forced(token_ids, len(generated))
        if forced:
            return (1 << forced[0]).to_bytes(self._num_bytes, "little")
        return self._matcher.allowed(generated, ahead)

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        return self._forced(generated, len(generated)) or self._matcher.forced(generated)

    def _forced(self, token_ids: Sequence[int], num_kept: int) -> Sequence[int]:
        """Return the forced tokens after `token_ids`, of which only the first `num_kept` are final.

        Raises ConstraintError if proposed tokens differ from forced ones.
        """
        if self._is_over or (begin := self._begin_in(token_ids, num_kept)) is None:
            return ()
        if (place := self._end_in(token_ids, begin)) is None:
            return ()
        end = self._rest_of_end(token_ids[begin:place])
        num_present = min(len(token_ids) - place, len(end))
        if list(token_ids[place : place + num_present]) != end[:num_present]:
            raise ConstraintError("the budget of the reasoning does not allow the tokens that were proposed")
        self._is_over = num_kept >= place + len(end)
        return end[num_present:]

    def _begin_in(self, token_ids: Sequence[int], num_kept: int) -> int | None:
        """Return the place after the text that begins the reasoning; None if it did not begin yet."""
        if self._begin is not None:
            return self._begin
        text = self._text(token_ids)
        if not text.startswith(self._budget.begins):
            may_begin = any(begin.startswith(text) for begin in self._budget.begins)
            self._is_over = not may_begin and len(token_ids) == num_kept
            return None
        places = range(1, len(token_ids) + 1)
        place = next(each for each in places if self._text(token_ids[:each]).startswith(self._budget.begins))
        if place <= num_kept:
            self._begin = place
        return place

    def _end_in(self, token_ids: Sequence[int], begin: int) -> int | None:
        """Return the place where the budget ends the reasoning; None if it is later."""
        first = begin + self._budget.max_tokens
        for place in range(first, min(first + MAX_CHAR_BYTES, len(token_ids) + 1)):
            if _is_complete(self._tokenizer.decode_bytes(list(token_ids[begin:place]))):
                return place
        last = first + MAX_CHAR_BYTES - 1
        return last if last <= len(token_ids) else None

    def _rest_of_end(self, thought: Sequence[int]) -> list[int]:
        """Return the tokens that end the reasoning: none if it has ended, fewer if the end has begun."""
        text = self._tokenizer.decode_bytes(list(thought))
        if any(end.encode() in text for end in self._budget.ends):
            return []
        end = self._budget.ends[0].encode()
        if len(token_ids := self._tokens(end)) == 1:
            return token_ids
        num_written = next(size for size in range(len(end) - 1, -1, -1) if text.endswith(end[:size]))
        return self._tokens(end[num_written:])

    def _tokens(self, text: bytes) -> list[int]:
        return self._tokenizer.tokenize_bytes(text, parse_special=True)

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode_str(list(token_ids)).lstrip(WHITE_SPACE)


def _is_complete(text: bytes) -> bool:
    """Return True unless the text ends within a UTF-8 character."""
    for size in range(1, min(MAX_CHAR_BYTES, len(text)) + 1):
        if text[-size] & 0xC0 != 0x80:  # the first byte of the last character
            return size >= _char_bytes(text[-size])
    return True


def _char_bytes(first: int) -> int:
    """Return the number of bytes of a UTF-8 character from its first byte."""
    return 1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
