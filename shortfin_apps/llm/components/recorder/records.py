"""Records of a flight recorder, which are also the lines of a dump: what ran on the device, and when.

A recorder keeps these objects, and completes them when an invocation ends. Times are seconds of the
recorder's clock; token IDs and page IDs are the engine's. No record contains text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

FORMAT_VERSION = 1
NOT_FINITE_ROW = -1  # replaces the checksum of a row with NaN, as its bits are not meaningful

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Ids = Sequence[Count]


class Header(msgspec.Struct, tag_field="kind", tag="header", kw_only=True):
    """The first line: what a replay needs to know about the server.

    `files` maps the files of the artefact's program to their SHA-256 sums.
    `epoch_s` is added to a time of the clock to get seconds since the epoch. `reason` is why the dump was
    written.
    """

    format_version: int = FORMAT_VERSION
    reason: str = ""
    written_s: float = 0.0
    epoch_s: float = 0.0
    model: str = ""
    files: dict[str, str] = {}
    versions: dict[str, str] = {}
    device: str = ""
    cpu: str = ""
    settings: dict[str, str | int | bool | None] = {}
    num_pages: Count = 0
    num_window_pages: Count = 0
    stride: Count = 0


class KnownRequest(msgspec.Struct, tag_field="kind", tag="request"):
    """A recorded request, with all its tokens, and its pages as of the first record."""

    number: Count
    request_id: str
    arrival_s: float
    num_prompt_tokens: Count
    token_ids: Ids
    page_ids: Ids
    window_page_ids: Ids | None


class Task(msgspec.Struct, array_like=True, gc=False):
    """The part of a request that one invocation computes: tokens from position `start` on."""

    request: Count
    start: Count
    token_ids: Ids


class Pages(msgspec.Struct, array_like=True, gc=False):
    """A block table update: from index `offset` on, the request's table has exactly these pages."""

    request: Count
    is_window: bool
    offset: Count
    page_ids: Ids


class Loop(msgspec.Struct, tag_field="kind", tag="loop"):
    """A decode loop's state before its first step; `sampling` has the fields of each task."""

    number: Count
    tasks: Sequence[Task]
    sampling: Sequence[Sequence[int]]


class Invocation(msgspec.Struct, kw_only=True):
    """Common fields of invocations. `ended_s` is None until the end; `error` is set if it failed."""

    number: Count
    began_s: float
    ended_s: float | None = None
    error: str | None = None
    pages: Sequence[Pages] = ()  # changes to block tables since the previous record
    size: Count = 0  # approximate bytes in memory


class Run(Invocation, tag_field="kind", tag="run", kw_only=True):
    """A batch. By task: CRC-32 sums of candidates, best candidates, and sums of some of the logits.

    Fields that were not fetched are empty.
    """

    entry: str
    family: str
    blocks: Count
    tasks: Sequence[Task]
    checksums: Sequence[int] = ()
    best: Sequence[int] = ()
    logits: Sequence[int] = ()


class Step(Invocation, tag_field="kind", tag="step", kw_only=True):
    """Step `index` of a decode loop; `token_ids` are the tokens it chose."""

    entry: str
    loop: Count
    index: Count
    token_ids: Sequence[int] = ()


class Array(msgspec.Struct, array_like=True, gc=False):
    """An argument as passed to the device."""

    dtype: str
    shape: Sequence[Count]
    data: bytes


class Draw(Invocation, tag_field="kind", tag="draw", kw_only=True):
    """Tokens drawn on the device from the rows of the last batch."""

    entry: str
    arguments: dict[str, Array]
    num_draws: Count
    token_ids: Sequence[int] = ()


class Clear(Invocation, tag_field="kind", tag="clear", kw_only=True):
    """Pages that were zeroed."""

    page_ids: Ids
    window_page_ids: Ids


class Turn(msgspec.Struct, tag_field="kind", tag="turn", kw_only=True):
    """A step of the engine. `ended` lists the requests that finished in it, with the reason."""

    began_s: float
    ended_s: float
    num_running: Count
    num_waiting: Count
    num_preemptions: Count  # total so far
    ended: Sequence[tuple[str, str]] = ()
    size: Count = 0


class End(msgspec.Struct, tag_field="kind", tag="end"):
    """The last line, with the number of lines before it; a dump without it was truncated."""

    num_lines: Count


Recorded = Run | Step | Draw | Clear | Turn
Line = Header | KnownRequest | Loop | Recorded | End
