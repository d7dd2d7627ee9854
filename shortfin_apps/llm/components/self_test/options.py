"""Options of a server's self-test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shortfin_apps.llm.contract.self_test_file import SelfTestFile

When = Literal["off", "start", "hourly"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestFacts:
    """The self-test of an artefact. `identity` and `kernels` are the manifest's, for reports.

    With `same_bits`, all entries must give a position bit-identical logits.
    """

    file: SelfTestFile
    identity: str | None = None
    kernels: tuple[str, ...] = ()
    same_bits: bool = False
