from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.api.answer_reader import (
    Began,
    Block,
    BlockKind,
    BlockReader,
    Ended,
    Grew,
    MessageReader,
)
from shortfin_apps.llm.serving.api.tools import PLAIN, AnswerForm
from shortfin_apps.llm.serving.dialects.choose import REASONING_DIALECTS, TOOL_DIALECTS
from shortfin_apps.llm.serving.dialects.dialect import Dialect, Function
from tests.serving.api.harness import MESSAGES, MESSAGES_ROUTE, RESPONSES, TOKENIZER, Harness
from tests.serving.api.scripted_engine import saying

HERMES = AnswerForm(
    dialect=Dialect(TOOL_DIALECTS["hermes"], REASONING_DIALECTS["think"]),
    functions=(Function("f", {}, strict=False),),
)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TEXTS = st.lists(st.sampled_from(["<think>", "</think>", CALL, CALL[:20], "hm ", "so", "\n"]), max_size=6)


def contents(blocks: list[Block]) -> list[tuple[BlockKind, int, str, str]]:
    return [(block.kind, block.index, block.name, block.text) for block in blocks]


@given(pieces=TEXTS, size=st.integers(1, 9), form=st.sampled_from([HERMES, PLAIN]))
def test_blocks_are_those_of_the_whole_however_the_text_comes(
    pieces: list[str], size: int, form: AnswerForm
) -> None:
    text = "".join(pieces)
    cut = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    reader, open_block = BlockReader(form), None
    grown: dict[int, str] = {}
    for place, part in enumerate(cut, 1):
        for change in reader.read(part, is_last=place == len(cut)):
            match change:
                case Began(block):
                    assert open_block is None
                    open_block, grown[block.index] = block, ""
                case Grew(block, more):
                    assert block is open_block
                    assert more
                    grown[block.index] += more
                case Ended(block):
                    assert block is open_block
                    open_block = None
    assert open_block is None
    assert grown == {block.index: block.text for block in reader.blocks}
    assert contents(reader.blocks) == contents(BlockReader(form).read_whole(text))


@pytest.mark.parametrize(("is_cut", "arguments"), [(True, '{"a": '), (False, '{"a": 1}')])
def test_only_a_cut_answer_has_half_of_a_call(is_cut: bool, arguments: str) -> None:
    text = CALL[: CALL.index("}")]
    [whole] = BlockReader(HERMES).read_whole(text, is_cut=is_cut)
    assert (whole.kind, whole.text) == (BlockKind.CALL, arguments)
    reader = BlockReader(HERMES)
    list(reader.read(text, is_last=True, is_cut=is_cut))
    assert contents(reader.blocks) == contents([whole])


class Uncopied(str):
    """A text that is not added to another one."""

    __slots__ = ()

    def __radd__(self, other: str) -> str:
        raise AssertionError("a text of all before is copied for each piece")


def test_a_text_that_grows_is_not_copied_for_each_piece() -> None:
    reader = BlockReader(PLAIN)
    for number in range(3):
        list(reader.read(Uncopied("a"), is_last=number == 2))
    assert reader.blocks[0].text == "aaa"


@given(pieces=TEXTS)
def test_blocks_hold_what_a_chats_message_does(pieces: list[str]) -> None:
    text = "".join(pieces)
    blocks = BlockReader(HERMES).read_whole(text)
    message: dict[str, Any] = MessageReader(HERMES).message(text)

    def joined(kind: BlockKind) -> str:
        return "".join(block.text for block in blocks if block.kind is kind)

    calls = [(block.name, block.text) for block in blocks if block.kind is BlockKind.CALL]
    assert joined(BlockKind.TEXT) == (message["content"] or "")
    assert joined(BlockKind.THOUGHT) == message.get("reasoning_content", "")
    assert calls == [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]


@pytest.mark.parametrize("form", [HERMES, PLAIN])
def test_an_empty_answer_has_an_empty_text(form: AnswerForm) -> None:
    assert contents(BlockReader(form).read_whole("")) == [(BlockKind.TEXT, 0, "", "")]


def test_thoughts_that_are_left_out_leave_no_block() -> None:
    form = AnswerForm(dialect=HERMES.dialect, functions=HERMES.functions, with_reasoning=False)
    assert contents(BlockReader(form).read_whole("<think>hm</think>so")) == [(BlockKind.TEXT, 0, "", "so")]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES_ROUTE])
async def test_a_stream_joins_its_text_at_the_end_alone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []

    def text_of(block: Block) -> str:
        joined.append("".join(block.parts))
        return joined[-1]

    monkeypatch.setattr(Block, "text", property(text_of))
    harness = Harness(saying(TOKENIZER, "a" * 100))
    field = "input" if path == RESPONSES else "messages"
    body = {field: MESSAGES, "max_tokens": 100, "stream": True}
    response = await harness.post(path, body)
    assert response.text.count("delta") > 50, "a token at a time"
    assert len(joined) < 10
