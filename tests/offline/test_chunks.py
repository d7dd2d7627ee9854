from __future__ import annotations

import pytest

from shortfin_apps.llm.client.answers import Chunk
from shortfin_apps.llm.contract.errors import UnavailableError
from shortfin_apps.llm.offline.chunks import chunks_of
from shortfin_apps.llm.serving.api.streamed_body import KEEP_ALIVE
from tests.scripted_server import DONE, completion_event, event


def test_a_piece_of_several_events_is_several_chunks() -> None:
    piece = completion_event("a") + completion_event("") + completion_event("b", "stop") + DONE
    assert list(chunks_of(piece)) == [Chunk("a"), Chunk("b", "stop")]


def test_comments_are_skipped() -> None:
    """As `SHORTFIN_LLM_STREAM_KEEP_ALIVE` has them sent."""
    piece = KEEP_ALIVE + completion_event("a", "stop") + KEEP_ALIVE + DONE
    assert list(chunks_of(piece)) == [Chunk("a", "stop")]


def test_an_error_in_the_stream_is_raised_after_what_came_before() -> None:
    chunks = chunks_of(
        completion_event("a") + event({"error": {"message": "no", "type": "service_unavailable_error"}})
    )
    assert next(chunks) == Chunk("a")
    with pytest.raises(UnavailableError, match="no"):
        next(chunks)
