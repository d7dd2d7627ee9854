"""Parses an answer's text, complete or streamed, into a message in OpenAI's format or into blocks.

A block is reasoning, text or one tool call. Blocks are in the order in which the model wrote them;
`/v1/responses` and `/v1/messages` return one object per block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any
from uuid import uuid4

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.serving.api.tools import PLAIN, AnswerForm
from shortfin_apps.llm.serving.dialects.dialect import NO_DIALECT
from shortfin_apps.llm.serving.dialects.feed import Arguments, CallStart, Content, Piece, Reasoning

REASONING_NAMES = ("reasoning_content", "reasoning")  # the second is vLLM's and OpenRouter's


class AnswerReader:
    """Splits the text of one answer, streamed or complete, into pieces."""

    def __init__(self, form: AnswerForm = PLAIN) -> None:
        self._form = form
        # Without a dialect there is no parser, because a parser would hold back trailing white space.
        self._parser = None if form.dialect == NO_DIALECT else form.parser()

    @property
    def is_plain(self) -> bool:
        """Whether the text is the answer's content unchanged."""
        return self._parser is None

    def pieces(self, text: str, *, is_last: bool, is_cut: bool = False) -> Sequence[Piece]:
        """Return the pieces that the next `text` completes, without reasoning if it was not requested.

        `is_last`: `text` ends the answer. `is_cut`: the answer was truncated, so that its last tool call may
        be incomplete.
        """
        if self._parser is None:
            return [Content(text)]
        pieces: Sequence[Piece] = self._parser.push(text)
        if is_last:
            pieces = [*pieces, *self._parser.finish(is_cut=is_cut)]
        if self._form.with_reasoning:
            return pieces
        return [piece for piece in pieces if not isinstance(piece, Reasoning)]

    def new_call_id(self) -> str:
        """Return a random tool call id, with the length that the model's chat template requires."""
        code, length = uuid4().hex, self._form.id_chars
        return f"call_{code}" if length is None else code[:length]


class MessageReader:
    """Converts the text of one answer, streamed or complete, to a message."""

    def __init__(self, form: AnswerForm = PLAIN) -> None:
        self._reader = AnswerReader(form)
        self._num_calls = 0

    @property
    def is_plain(self) -> bool:
        """Whether the text is the message's content unchanged."""
        return self._reader.is_plain

    def message(self, text: str, *, is_cut: bool = False) -> dict[str, Any]:
        """Return the complete message."""
        pieces = self._reader.pieces(text, is_last=True, is_cut=is_cut)
        content = _text_of(pieces, Content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := _text_of(pieces, Reasoning):
            message |= dict.fromkeys(REASONING_NAMES, reasoning)
        if calls := self._calls(pieces):
            message["content"] = content or None
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        return message

    def delta(self, text: str, *, is_last: bool, is_cut: bool = False) -> dict[str, Any]:
        """Return the fields that the next `text` adds to the message; empty if `text` is held back."""
        pieces = self._reader.pieces(text, is_last=is_last, is_cut=is_cut)
        delta: dict[str, Any] = {}
        if reasoning := _text_of(pieces, Reasoning):
            delta |= dict.fromkeys(REASONING_NAMES, reasoning)
        if content := _text_of(pieces, Content):
            delta["content"] = content
        if calls := self._calls(pieces):
            delta["tool_calls"] = calls
        return delta

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Return OpenAI's finish reason. Callers must have read the message or its last delta before."""
        return "tool_calls" if self._num_calls and reason is FinishReason.STOP else reason

    def _calls(self, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        """Return tool calls that start or continue in `pieces`; a continued call has neither id nor name."""
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, CallStart):
                calls.append(self._begin_call(piece.name))
            elif isinstance(piece, Arguments):
                if not calls:
                    calls.append({"index": self._num_calls - 1, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += piece.text
        return calls

    def _begin_call(self, name: str) -> dict[str, Any]:
        self._num_calls += 1
        return {
            "index": self._num_calls - 1,
            "id": self._reader.new_call_id(),
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }


def _text_of(pieces: Iterable[Piece], kind: type[Content | Reasoning]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


class BlockKind(Enum):
    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()


KIND_OF = {Reasoning: BlockKind.THOUGHT, Content: BlockKind.TEXT, Arguments: BlockKind.CALL}


@dataclass(slots=True, kw_only=True)
class Block:
    """The block of an answer at position `index`; generated text is appended to `parts`."""

    kind: BlockKind
    index: int
    name: str = ""  # `name` and `call_id` are set for tool calls only
    call_id: str = ""
    parts: list[str] = field(default_factory=list)  # joined on demand, as appending to a string copies it

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Began:
    block: Block


@dataclass(frozen=True, slots=True)
class Grew:
    """`text` was appended to the block."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    block: Block


Change = Began | Grew | Ended


class BlockReader:
    """Splits the text of one answer, streamed or complete, into blocks.

    An answer has at least one block. Only its last block can still grow.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._reader = AnswerReader(form)
        self.blocks: list[Block] = []  # started so far
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        return any(block.kind is BlockKind.CALL for block in self.blocks)

    def read(self, text: str, *, is_last: bool, is_cut: bool = False) -> Iterator[Change]:
        """Yield the changes that the next `text` makes to the blocks. Callers must exhaust the iterator."""
        for piece in self._reader.pieces(text, is_last=is_last, is_cut=is_cut):
            yield from self._take(piece)
        if is_last:
            if not self.blocks:
                yield from self._begin(BlockKind.TEXT)
            yield from self._end()

    def read_whole(self, text: str, *, is_cut: bool = False) -> list[Block]:
        """Return the blocks of a complete answer."""
        for _ in self.read(text, is_last=True, is_cut=is_cut):
            pass
        return self.blocks

    def _take(self, piece: Piece) -> Iterator[Change]:
        if isinstance(piece, CallStart):
            yield from self._begin(BlockKind.CALL, piece.name, self._reader.new_call_id())
        elif piece.text:
            kind = KIND_OF[type(piece)]
            if not self._is_open or self.blocks[-1].kind is not kind:
                yield from self._begin(kind)
            self.blocks[-1].parts.append(piece.text)
            yield Grew(self.blocks[-1], piece.text)

    def _begin(self, kind: BlockKind, name: str = "", call_id: str = "") -> Iterator[Change]:
        yield from self._end()
        self.blocks.append(Block(kind=kind, index=len(self.blocks), name=name, call_id=call_id))
        self._is_open = True
        yield Began(self.blocks[-1])

    def _end(self) -> Iterator[Change]:
        if self._is_open:
            self._is_open = False
            yield Ended(self.blocks[-1])
