"""The self-test of a program: compares every entry with the reference and with other entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace

from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.self_test.computed import Computed
from shortfin_apps.llm.components.self_test.entries import EntryRuns
from shortfin_apps.llm.contract.errors import DeviceLostError, InvocationError
from shortfin_apps.llm.contract.self_test_file import SelfTestFile

Key = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class EntryFailure:
    """An entry that failed, and why; `error`, `prompt` and `position` describe a faulty row, if any."""

    entry: str
    problem: str
    error: float | None = None
    prompt: int | None = None
    position: int | None = None


@dataclass(slots=True)
class Outcome:
    """Results of a self-test so far.

    `rows`: results of all entries. `broken`: entries that failed to run, with the reason. `untested`: entries
    for which there were too few pages. `lost_device`: why no entry can run any more, if the device is lost.
    """

    file: SelfTestFile
    rows: list[Computed] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    untested: list[str] = field(default_factory=list)
    lost_device: DeviceLostError | None = None

    @property
    def entries(self) -> list[str]:
        """Entries in the order in which they ran."""
        return list(dict.fromkeys([*(row.entry for row in self.rows), *self.broken, *self.untested]))

    @property
    def bits(self) -> dict[Key, bytes]:
        """The digest of each row, by the row's key."""
        return {row.key: row.bits for row in self.rows}

    def worst(self, entry: str) -> Computed | None:
        """Return the entry's row that deviates most from the expected result; None if it has no rows."""
        rows = [row for row in self.rows if row.entry == entry]
        return max(rows, key=lambda row: (row.problem is not None, row.error), default=None)

    def failures(
        self, *, same_bits: bool = False, known_bits: Mapping[Key, bytes] | None = None
    ) -> list[EntryFailure]:
        """Return the entries that failed, in the order in which they ran: the first may explain the others.

        With `same_bits`, all entries must compute bit-identical logits for a position. With `known_bits`,
        each row must also have the bits that `known_bits` has for it, if any.
        """
        found = []
        others = self.differing_bits() if same_bits else {}
        for entry in self.entries:
            if entry in self.broken:
                found.append(EntryFailure(entry, self.broken[entry]))
            elif (failure := self._failure(entry, known_bits or {})) is not None:
                found.append(failure)
            elif (row := others.get(entry)) is not None:
                problem = "computes other bits than most entries"
                found.append(EntryFailure(entry, problem, row.error, row.prompt, row.position))
        return found

    def _failure(self, entry: str, known_bits: Mapping[Key, bytes]) -> EntryFailure | None:
        worst = self.worst(entry)
        if worst is None:
            return None
        at = worst.prompt, worst.position
        if worst.problem is not None:
            return EntryFailure(entry, f"is wrong: {worst.problem}", None, *at)
        if not worst.passes(self.file.tolerance):
            return EntryFailure(
                entry,
                f"differs from the reference by {worst.error:.2g} of the logits' deviation (allowed "
                f"{self.file.tolerance:.2g})",
                worst.error,
                *at,
            )
        for row in self.rows:
            if row.entry == entry and known_bits.get(row.key, row.bits) != row.bits:
                return EntryFailure(
                    entry,
                    "computes other bits than it did when the server started",
                    row.error,
                    row.prompt,
                    row.position,
                )
        return None

    def differing_bits(self) -> dict[str, Computed]:
        """Return, by entry, the first row with other logits than most rows at the same position.

        Entries without such a row are left out.
        """
        seen: dict[tuple[bool, int, int], Counter[bytes]] = {}
        for row in self._of_logits():
            seen.setdefault(row.place, Counter())[row.bits] += 1
        usual = {at: counts.most_common(1)[0][0] for at, counts in seen.items()}
        found: dict[str, Computed] = {}
        for row in self._of_logits():
            if row.bits != usual[row.place]:
                found.setdefault(row.entry, row)
        return found

    def _of_logits(self) -> Iterator[Computed]:
        return (row for row in self.rows if not row.is_drawn)


class SelfTest:
    """Runs a program's entries on the test prompts, using pages leased from `cache`.

    Not thread-safe. Callers must use the engine's thread, between invocations.
    """

    def __init__(self, runner: BatchRunner, cache: KVCache, file: SelfTestFile) -> None:
        self._runner = runner
        self._cache = cache
        self._file = file

    @property
    def file(self) -> SelfTestFile:
        return self._file

    def steps(self, outcome: Outcome) -> Generator[None]:
        """Run the entries that `outcome` does not contain yet, one invocation per step.

        Closing the generator returns all pages, and drops the results of an entry that is not finished.
        """
        runs = EntryRuns(self._runner, self._cache, self._file)
        try:
            for shape in runs.shapes:
                if shape.entry in outcome.entries:
                    continue
                rows: list[Computed] = []
                try:
                    with closing(runs.of(shape)) as invocations:
                        for computed in invocations:
                            rows += computed
                            yield
                except InvocationError as error:
                    if isinstance(error, DeviceLostError):
                        outcome.lost_device = error
                    outcome.broken[shape.entry] = "failed: " + str(error).partition("\n")[0]
                    continue
                if not rows:
                    outcome.untested.append(shape.entry)
                outcome.rows += _numbered(rows)
        finally:
            runs.release()

    def run(self) -> Outcome:
        """Run all entries at once."""
        outcome = Outcome(self._file)
        for _ in self.steps(outcome):
            pass
        return outcome


def _numbered(rows: list[Computed]) -> list[Computed]:
    """Number the results of one entry: results of several invocations have the same index in the batch."""
    return [replace(row, row=index) for index, row in enumerate(rows)]
