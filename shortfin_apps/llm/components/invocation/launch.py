"""Invocations in flight: a batch that the device computes, and entries that read the batch's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.components.invocation.buckets import Shape
from shortfin_apps.llm.components.recorder.records import Draw, Logprobs, Run, Step
from shortfin_apps.llm.components.runtime.device import Pending


@dataclass(frozen=True, slots=True)
class Launch:
    """A batch in flight on the entry of `shape`; `record` is the flight recorder's, if there is one."""

    batch: Batch
    shape: Shape
    pending: Pending
    record: Run | Step | None = None


@dataclass(frozen=True, slots=True)
class DrawLaunch:
    """A sampling entry in flight, which draws a token for each of `rows` (indices of tasks of a batch)."""

    rows: Sequence[int]
    pending: Pending
    record: Draw | None = None


@dataclass(frozen=True, slots=True)
class LogprobsLaunch:
    """A `logprobs` entry in flight, which computes terms of each of `rows` (indices of tasks of a batch)."""

    rows: Sequence[int]
    pending: Pending
    record: Logprobs | None = None
