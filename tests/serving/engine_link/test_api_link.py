from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from shortfin_apps.llm.components.grammar.source import ANY_OBJECT, GrammarSource
from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.serving.engine_link.api_link import AdmittingEngine, ApiLink
from shortfin_apps.llm.serving.engine_link.messages import Abort, Admitted, Message, Refused, Submit
from shortfin_apps.llm.serving.frontend.delta_stream import DeltaStream
from tests.components.engine_fixture import call
from tests.components.grammar.test_compiled import compiled
from tests.serving.frontend.test_beam_search import PROMPT

SUBMISSION = Submit(call("a", PROMPT), ANY_OBJECT, "guided_json")


class Engine:
    """Admits everything, and keeps what was aborted."""

    def __init__(self) -> None:
        self.admitted: list[str] = []
        self.aborted: list[str] = []

    def admit(self, given: GenerateCall) -> DeltaStream:
        self.admitted.append(given.request_id)
        return DeltaStream(lambda: None)

    def abort(self, request_id: str, error: LlmError | None = None) -> bool:
        self.aborted.append(request_id)
        return True


class SlowGrammars:
    """Compiles a grammar when the test says so."""

    def __init__(self) -> None:
        self.compiling: list[asyncio.Future[Grammar]] = []

    async def compile_tried(self, source: GrammarSource, param: str, tenant: str) -> Grammar:
        self.compiling.append(asyncio.get_running_loop().create_future())
        return await self.compiling[-1]


class Linked:
    """A link whose messages the test gives and keeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.grammars = Engine(), SlowGrammars()
        self.sent: list[Message] = []
        ours, theirs = socket.socketpair()
        ours.close()
        theirs.close()
        self.link = ApiLink(ours, on_ask=lambda *_: None, on_lost=lambda _: None)
        monkeypatch.setattr(self.link, "send", self.sent.append)
        self.link.serve(cast(AdmittingEngine, self.engine), self.grammars, cast(Any, None))
        self.sent.clear()

    def receive(self, *messages: Message) -> None:
        for message in messages:
            self.link._receive(cast(Any, message))


@pytest.fixture
async def linked(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Linked]:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    yield Linked(monkeypatch)
    assert not failures


async def turns(number: int = 5) -> None:
    """Turns of the event loop."""
    for _ in range(number):
        await asyncio.sleep(0)


async def test_an_abort_reaches_a_request_whose_grammar_has_just_been_compiled(linked: Linked) -> None:
    linked.receive(SUBMISSION)
    await turns()
    linked.grammars.compiling[0].set_result(compiled("a"))
    asyncio.get_running_loop().call_soon(linked.receive, Abort("a"))  # in the turn in which it is admitted
    await turns()
    assert (linked.engine.admitted, linked.engine.aborted) == (["a"], ["a"])
    assert linked.sent == [Admitted("a")]


async def test_an_id_may_be_used_again_while_its_compilation_is_cancelled(linked: Linked) -> None:
    linked.receive(SUBMISSION)
    await turns()
    linked.receive(Abort("a"), SUBMISSION)
    await turns()
    linked.receive(Abort("a"))
    await turns()
    assert [type(message) for message in linked.sent] == [Refused, Refused]
    assert all(future.cancelled() for future in linked.grammars.compiling)
    assert not linked.engine.admitted
