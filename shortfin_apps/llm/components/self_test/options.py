"""What a server tests, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shortfin_apps.llm.self_test_file import SelfTestFile

When = Literal["off", "start", "hourly"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestOptions:
    """`file` is None for an artefact without a self-test; `identity` and `kernels`, for reports, are the
    manifest's. With `same_bits`, all entries must give a position the same logits to the bit.
    """

    when: When = "off"
    file: SelfTestFile | None = None
    identity: str | None = None
    kernels: tuple[str, ...] = ()
    same_bits: bool = False


NO_SELF_TEST = SelfTestOptions()
