"""Proposals for models whose random weights repeat nothing: the known answers, some of them wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.integration.generation import open_engine
from tests.integration.test_speculation import answers, calls

# Opens an engine to which texts (prompts with answers) are proposed.
Proposing = Callable[..., AbstractContextManager[Engine]]


def told(texts: Sequence[Sequence[int]], token_ids: Sequence[int], number: int) -> int | None:
    """Return what is proposed after these tokens and `number` more; None after the end of all texts."""
    length = len(token_ids)
    known = next((text for text in texts if list(text[:length]) == list(token_ids)), ())
    is_wrong = number == length * 7 % 5
    return known[length + number] ^ is_wrong if length + number < len(known) else None


@contextmanager
def proposing(artifact: Artifact, settings: EngineSettings) -> Iterator[Engine]:
    """Open an engine of which some proposals must be accepted, and some rejected."""
    with open_engine(artifact, settings) as engine:
        yield engine
        counts = engine.stats().speculation
    assert counts is not None
    assert 5 < counts.accepted < counts.proposed - 5


def check(artifact: Artifact, opened: Proposing, **options: Any) -> None:
    """Check that answers are the same with proposals as without."""
    asked = calls(60)
    with open_engine(artifact, EngineSettings(**options)) as engine:
        expected = answers(engine, asked)
    texts = [[*each.prompt_token_ids, *tokens] for each, (tokens, _) in zip(asked, expected, strict=True)]
    with opened(artifact, texts, **options) as engine:
        assert answers(engine, asked) == expected
