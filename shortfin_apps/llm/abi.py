"""The ABI of a VMFB: upstream shortfin's for paged language models, and our `extend` entries."""

from __future__ import annotations

from enum import StrEnum


class EntryFamily(StrEnum):
    """The kinds of entries: a batch runs on one of its family, which lays out the tokens."""

    PREFILL = "prefill"
    DECODE = "decode"
    EXTEND = "extend"
