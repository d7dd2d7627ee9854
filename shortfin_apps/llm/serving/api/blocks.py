"""Blocks of an answer: thoughts, texts and calls, in the order in which the model wrote them.

`/v1/responses` and `/v1/messages` return one object per block, either complete or as deltas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from shortfin_apps.llm.serving.api.messages import AnswerReader
from shortfin_apps.llm.serving.api.tools import AnswerForm
from shortfin_apps.llm.serving.dialects.feed import Arguments, CallStart, Content, Piece, Reasoning


class BlockKind(Enum):
    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()


KIND_OF = {Reasoning: BlockKind.THOUGHT, Content: BlockKind.TEXT, Arguments: BlockKind.CALL}


@dataclass(slots=True, kw_only=True)
class Block:
    """The `index`-th block of an answer; text is appended to `parts` as it is generated."""

    kind: BlockKind
    index: int
    name: str = ""  # `name` and `call_id` are set for calls
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
    """Splits the streamed text of one answer into blocks: at least one, and only the last is open."""

    def __init__(self, form: AnswerForm) -> None:
        self._reader = AnswerReader(form)
        self.blocks: list[Block] = []  # started so far
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        return any(block.kind is BlockKind.CALL for block in self.blocks)

    def read(self, text: str, *, is_last: bool, is_cut: bool = False) -> Iterator[Change]:
        """Yield the changes that the next `text` makes. The iterator must be exhausted."""
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
