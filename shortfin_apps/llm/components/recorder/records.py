"""Records of a flight recorder, which are also the lines of a dump: what ran on the device, and when.

A recorder keeps these objects, and completes each when its invocation ends. Times are seconds of the
recorder's clock; token IDs and page IDs are the engine's. No record contains a request's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

FORMAT_VERSION = 3
NOT_FINITE_ROW = -1  # replaces the checksum of a row with NaN, because its bits are not meaningful

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Ids = Sequence[Count]
TokenId = Annotated[int, msgspec.Meta(ge=-(1 << 53), lt=1 << 53)]


class LastLaunch(msgspec.Struct, kw_only=True):
    """The invocation at which a device stopped: the first that did not succeed after the last that did.

    `number` is its record's, `rows` are of its batch, and `tokens` are computed by it. `age_s` is the time
    from its launch until the dump. `state`: what was known of it then. `num_queued` invocations were launched
    after it.
    """

    number: Count
    entry: str
    rows: Count
    tokens: Count
    age_s: float
    state: Literal["running", "failed", "done"]
    num_queued: Count = 0

    def to_dict(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.entry} with {self.rows} rows and {self.tokens} tokens, launched {self.age_s:.1f} s ago, "
            f"{self.state}"
        )


class Header(msgspec.Struct, tag_field="kind", tag="header", kw_only=True):
    """The first line: what a replay needs to know about the server, and why the dump was written.

    `files` maps the files of the artefact's program to their SHA-256 sums. A recorded time plus `epoch_s` is
    Unix time. `last_launch` is None if nothing was recorded.
    """

    format_version: int = FORMAT_VERSION
    reason: str = ""
    written_s: float = 0.0
    epoch_s: float = 0.0
    model: str = ""
    files: dict[str, str] = {}
    versions: dict[str, str] = {}
    device: str = ""
    last_launch: LastLaunch | None = None
    cpu: str = ""
    settings: dict[str, str | int | bool | None] = {}
    num_pages: Count = 0
    num_window_pages: Count = 0
    stride: Count = 0


class KnownRequest(msgspec.Struct, tag_field="kind", tag="request"):
    """A recorded request: all its tokens, and its block tables as of the dump's first record."""

    number: Count
    request_id: str
    arrival_s: float
    num_prompt_tokens: Count
    token_ids: Ids
    page_ids: Ids
    window_page_ids: Ids | None


class Task(msgspec.Struct, array_like=True, gc=False):
    """The part of a request that one invocation computes: tokens from position `start` on.

    A single negative token was still to be drawn by the device when the invocation was queued (abi.py).
    `state_page`: the page for the state after a proposed token, in place of the one in the block table.
    """

    request: Count
    start: Count
    token_ids: Sequence[TokenId]
    state_page: Count | None = None


class Pages(msgspec.Struct, array_like=True, gc=False):
    """A block table update: truncate the request's table to `offset` pages, then append `page_ids`."""

    request: Count
    is_window: bool
    offset: Count
    page_ids: Ids


class Loop(msgspec.Struct, tag_field="kind", tag="loop"):
    """A decode loop: decodes of the same requests at consecutive positions. `tasks` are of the first step.

    `sampling` has a list of SamplingField values per task.
    """

    number: Count
    tasks: Sequence[Task]
    sampling: Sequence[Sequence[int]]


class Invocation(msgspec.Struct, kw_only=True):
    """Common fields of invocations. `ended_s` is None until the invocation ends; `error` is why it failed."""

    number: Count
    began_s: float
    ended_s: float | None = None
    error: str | None = None
    pages: Sequence[Pages] = ()  # changes to block tables since the previous record
    size: Count = 0  # approximate bytes in memory


class Run(Invocation, tag_field="kind", tag="run", kw_only=True):
    """A batch. The last three fields have an item per task, or are empty if they were not fetched.

    `checksums`: CRC-32 of the candidates. `best`: the best candidate's token ID. `logits`: CRC-32 of a sample
    of the logits.
    """

    entry: str
    family: str
    blocks: Count
    tasks: Sequence[Task]
    checksums: Sequence[int] = ()
    best: Sequence[int] = ()
    logits: Sequence[int] = ()


class Step(Invocation, tag_field="kind", tag="step", kw_only=True):
    """Step `index` of decode loop `loop`; `token_ids` are the tokens that the step chose, one per task."""

    entry: str
    loop: Count
    index: Count
    token_ids: Sequence[int] = ()


class Array(msgspec.Struct, array_like=True, gc=False):
    """An array argument as passed to the device."""

    dtype: str
    shape: Sequence[Count]
    data: bytes


class Draw(Invocation, tag_field="kind", tag="draw", kw_only=True):
    """Tokens drawn on the device from the rows of logits of the last Run or Step before it."""

    entry: str
    arguments: dict[str, Array]
    num_draws: Count
    token_ids: Sequence[int] = ()


class Logprobs(Invocation, tag_field="kind", tag="logprobs", kw_only=True):
    """Terms of log-probabilities of rows of the last Run or Step before it, computed on the device.

    `masses` has an item per row: the sum of its weights (abi.py), or NOT_FINITE_ROW.
    """

    entry: str
    arguments: dict[str, Array]
    num_rows: Count
    masses: Sequence[int] = ()


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


Recorded = Run | Step | Draw | Logprobs | Clear | Turn
Line = Header | KnownRequest | Loop | Recorded | End
