"""The report of a failed self-test, and its one-sentence summary."""

from __future__ import annotations

import json
import platform
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shortfin_apps.llm import __version__
from shortfin_apps.llm.components.self_test.computed import Computed
from shortfin_apps.llm.components.self_test.locate import Location
from shortfin_apps.llm.components.self_test.self_test import EntryFailure, Outcome
from shortfin_apps.llm.contract.iree_release import installed_version

_LIBRARIES = ("iree-base-runtime", "shortfin", "numpy")
_CPUINFO = Path("/proc/cpuinfo")
# Kinds of operations in the manifest's `kernels`: outside of the layers, and after the layers.
_OUTSIDE = ("Embed", "LastTokens", "CapLogits", "TopK", "Sample")
_AFTER = ("Norm", "Linear", "CapLogits", "TopK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The tested artefact and device. `identity` and `kernels` are the manifest's."""

    device: str
    identity: str | None = None
    kernels: tuple[str, ...] = ()


def sentence(subject: Subject, failures: Sequence[EntryFailure], location: Location | None) -> str:
    """Summarise a failed self-test in one sentence, about the first entry that failed."""
    first, others = failures[0], len(failures) - 1
    parts = [f"self-test: `{first.entry}` {first.problem}"]
    if location is not None:
        parts[0] += f", {location}"
        parts.append(f"computed by {', '.join(kernels_at(subject.kernels, location)) or 'unknown kernels'}")
    if others:
        parts.append(f"{others} other {'entries fail' if others > 1 else 'entry fails'} too")
    return "; ".join(parts)


def kernels_at(kernels: Iterable[str], location: Location) -> list[str]:
    """Return the names of the kernels that compute what is wrong; "linalg" only if there is no other."""

    def computes_it(kind: str) -> bool:
        return kind in _AFTER if location.layer is None else kind not in _OUTSIDE

    named = [re.match(r"(\w+): ([^,;]+)", line) for line in kernels]
    found = dict.fromkeys(each[2] for each in named if each is not None and computes_it(each[1]))
    return [name for name in found if name != "linalg"] or list(found)


def document(
    subject: Subject, outcome: Outcome, failures: Sequence[EntryFailure], location: Location | None
) -> dict[str, Any]:
    """Return the full report, to send with a support request. It contains no user data."""
    return {
        "version": __version__,
        "versions": {name: installed_version(name) for name in _LIBRARIES},
        "cpu": cpu_model(),
        "platform": platform.platform(),
        "device": subject.device,
        "artifact": subject.identity,
        "kernels": list(subject.kernels),
        "tolerance": outcome.file.tolerance,
        "failures": [asdict(failure) for failure in failures],
        "location": None if location is None else asdict(location),
        "entries": {entry: _entry(outcome, entry) for entry in outcome.entries},
    }


def write(document: dict[str, Any]) -> Path | None:
    """Write a report into the temporary directory; return None if the directory is not writable."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="shortfin-llm-self-test-", suffix=".json", delete=False, encoding="utf-8"
        ) as file:
            json.dump(document, file, indent=2)
    except OSError:
        return None
    return Path(file.name)


def cpu_model() -> str:
    """Return the CPU's name as Linux reports it, or the machine's architecture if Linux reports none."""
    try:
        found = re.search(r"^model name\s*: (.*)$", _CPUINFO.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def _entry(outcome: Outcome, entry: str) -> dict[str, Any]:
    rows = [row for row in outcome.rows if row.entry == entry]
    return {
        "problem": outcome.broken.get(entry),
        "is_tested": entry not in outcome.untested,
        "rows": [_row(row) for row in rows],
    }


def _row(row: Computed) -> dict[str, Any]:
    return {
        "row": row.row,
        "prompt": row.prompt,
        "position": row.position,
        "error": row.error if row.error != float("inf") else None,
        "problem": row.problem,
        "bits": row.bits.hex(),
    }
