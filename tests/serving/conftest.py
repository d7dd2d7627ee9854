from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from shortfin_apps.llm.components.grammar import trials
from shortfin_apps.llm.limited_process import LimitedProcess
from tests.serving.api.harness import Harness


class SharedProcess(LimitedProcess):
    """A process that closes with the last test, not with the compiler that started it."""

    started: dict[object, SharedProcess] = {}  # noqa: RUF012  (of all tests, by arguments)

    def __init__(self, *arguments: Any, text: str) -> None:
        super().__init__(*arguments, text=text)
        self.ends_at_exit, self.close = self.close, lambda: None  # type: ignore[assignment]

    @classmethod
    def of(cls, *arguments: Any, text: str) -> SharedProcess:
        key = repr(arguments), text
        if key not in cls.started or cls.started[key].is_over:
            cls.started[key] = cls(*arguments, text=text)
        return cls.started[key]


@pytest.fixture(scope="module", autouse=True)
def shared_trials() -> Iterator[None]:
    """Have the grammars of one tokenizer compiled in one process, as in a server: starting it takes 0.2 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "LimitedProcess", SharedProcess.of)
        yield


@pytest_asyncio.fixture
async def harness() -> AsyncIterator[Harness]:
    harness = Harness()
    yield harness
    assert not harness.engine.live, "every request was answered or aborted"
    await harness.client.aclose()
