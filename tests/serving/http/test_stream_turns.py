from __future__ import annotations

import asyncio

from shortfin_apps.llm.serving.http.streaming import MAX_WORK, EventStream, StreamTurns


class Taker(EventStream):
    def __init__(self, name: str, log: list[str], work: int = 1) -> None:
        self.name = name
        self.log = log
        self.work = work

    def convert(self) -> int:
        self.log.append(f"convert {self.name}")
        return self.work

    def send(self) -> None:
        self.log.append(f"send {self.name}")


async def test_all_streams_are_converted_and_then_sent_in_one_turn() -> None:
    turns, log = StreamTurns(), []  # type: tuple[StreamTurns, list[str]]
    for name in ("a", "b"):
        turns.add(Taker(name, log))
    assert log == []
    await asyncio.sleep(0)
    assert log == ["convert a", "convert b", "send a", "send b"]


async def test_a_stream_added_during_a_turn_takes_part_in_the_next() -> None:
    turns, log = StreamTurns(), []  # type: tuple[StreamTurns, list[str]]

    class Again(Taker):
        def send(self) -> None:
            super().send()
            if self.name == "a":
                turns.add(Taker("b", log))

    turns.add(Again("a", log))
    await asyncio.sleep(0)
    assert log == ["convert a", "send a"]
    await asyncio.sleep(0)
    assert log[2:] == ["convert b", "send b"]


async def test_more_work_than_a_turn_may_have_waits_for_the_next() -> None:
    turns, log = StreamTurns(), []  # type: tuple[StreamTurns, list[str]]
    for name in ("a", "b", "c"):
        turns.add(Taker(name, log, MAX_WORK // 2))
    await asyncio.sleep(0)
    assert log == ["convert a", "convert b", "send a", "send b"]
    await asyncio.sleep(0)
    assert log[4:] == ["convert c", "send c"]
    await asyncio.sleep(0)
    assert log[6:] == []
