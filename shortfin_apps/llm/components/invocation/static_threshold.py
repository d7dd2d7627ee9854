"""Turns off the static entries of a program that are larger than a threshold.

Without them, their batches run on dynamic entries: prefills on `prefill_bs{N}`, everything else on the packed
`extend`. Entries that are off are not warmed up or tested, and need no memory for results and workspace. A
threshold of 0 turns all of them off, which other servers call eager mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shortfin_apps.llm.components.runtime.device import DeviceBuffer, EntrySignature, Pending, Program
from shortfin_apps.llm.contract.abi import Entry, EntryFamily, Layout
from shortfin_apps.llm.contract.errors import ArtifactError


def with_static_threshold(program: Program, threshold: int | None) -> Program:
    """Return the program without static entries of more than `threshold` tokens; None: with all entries.

    Raises ArtifactError if no other entry takes the batches of one that is off.
    """
    if threshold is None:
        return program
    off = {
        name: entry
        for name in program.entries
        if (entry := Entry.parse(name)) is not None
        and entry.bucket_tokens is not None
        and entry.bucket_tokens > threshold
        and entry.family is not EntryFamily.DRAFT  # no dynamic entry drafts
    }
    kept = {name: each for name, each in program.entries.items() if name not in off}
    if not _has_packed_extend(kept) and (needed := _without_substitute(off.values(), kept)):
        raise ArtifactError(
            f"`--static-threshold {threshold}` turns off {', '.join(each.name for each in needed)}, and the "
            "VMFB has no dynamic entry for their batches; rebuild it with `shortfin-llm build`, which adds a "
            f"packed `extend`, or raise the threshold to {max(each.bucket_tokens or 0 for each in needed)}"
        )
    return _ReducedProgram(program, kept)


class _ReducedProgram:
    """A program with some of its entries."""

    def __init__(self, program: Program, entries: Mapping[str, EntrySignature]) -> None:
        self._program = program
        self.entries = entries

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Pending:
        return self._program.submit(entry, arguments)


def _has_packed_extend(entries: Mapping[str, EntrySignature]) -> bool:
    extend = Entry(EntryFamily.EXTEND, None, None)
    signature = entries.get(extend.name)
    return signature is not None and extend.layout(signature.tokens_rank) is Layout.PACKED


def _without_substitute(off: Iterable[Entry], kept: Iterable[str]) -> list[Entry]:
    """Return the decodes that are off, and the prefills without a dynamic one of as many rows."""
    return [
        entry
        for entry in off
        if entry.family is EntryFamily.DECODE
        or (
            entry.family is EntryFamily.PREFILL
            and Entry(EntryFamily.PREFILL, entry.rows, None).name not in kept
        )
    ]
