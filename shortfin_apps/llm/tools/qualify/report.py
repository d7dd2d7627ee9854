"""The report of a qualification as JSON. It names no person, machine or folder, so it can be published."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import shortfin_apps.llm
from shortfin_apps.llm.builder.cache import user_cache
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.tools.qualify.bench import Plan
from shortfin_apps.llm.tools.qualify.check import Check
from shortfin_apps.llm.tools.qualify.outcome import Outcome, Status
from shortfin_apps.llm.tools.qualify.page import page

SCHEMA = "shortfin-llm-qualify/1"
JSON_FILE, PAGE_FILE = "qualify.json", "qualify.html"
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|AUTH|CREDENTIAL", re.IGNORECASE)  # in names of variables
_MIN_SECRET_CHARS = 6
# Names that are no one's, and would also replace words.
_COMMON_NAMES = ("root", "user", "ubuntu", "admin", "localhost", "cpu", "hip")

INTERRUPTED = "interrupted before its end"
_COMMON_FOLDERS = ("/", "/usr", "/usr/local", "/tmp")

Folders = Iterable[tuple[str | Path, str]]
"""Folders, each with what stands for it in a report."""


def document(
    plan: Plan,
    checks: Sequence[Check],
    outcomes: Sequence[Outcome],
    folders: Folders = (),
    *,
    is_interrupted: bool = False,
) -> dict[str, Any]:
    """Return the report's JSON, with private names replaced in what the machine and the checks tell.

    `folders`: further private folders, each with what stands for it. If `is_interrupted`, checks without an
    outcome are skipped, and the report has not passed.
    """
    if is_interrupted:
        done = {outcome.name for outcome in outcomes}
        left = [check.name for check in checks if check.name not in done]
        outcomes = [*outcomes, *(Outcome(name, Status.SKIPPED, INTERRUPTED, 0.0) for name in left)]
    subject = shown(plan.subject)
    plain = Private.of_this_process([(plan.subject, subject), *folders]).removed_from
    abouts = {check.name: check.about for check in checks}
    failed = [outcome for outcome in outcomes if outcome.status is Status.FAILED]
    machine = next((dict(each.figures) for each in outcomes if each.name == "machine"), {})
    return {
        "schema": SCHEMA,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "subject": plain(subject),
        "device": plan.device,
        "passed": not failed and not is_interrupted,
        "interrupted": is_interrupted,
        "faults": list(dict.fromkeys(str(each.fault) for each in failed if each.fault is not None)),
        "counts": {status: sum(each.status is status for each in outcomes) for status in Status},
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
        "machine": plain(machine),
        "checks": [
            {
                **asdict(outcome),
                "text": plain(outcome.text),
                "about": abouts[outcome.name],
                "seconds": round(outcome.seconds, 2),
                "figures": {} if outcome.name == "machine" else plain(outcome.figures),
            }
            for outcome in outcomes
        ],
    }


def shown(subject: str) -> str:
    """Return a subject's name without its folder."""
    path = Path(subject)
    return path.resolve().name if path.exists() else subject


def prepare(folder: Path) -> None:
    """Make `folder`, and see that files can be written there. Raises InvalidRequestError if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (JSON_FILE, PAGE_FILE):
            if (folder / name).is_dir():
                raise InvalidRequestError(f"cannot write {folder / name}: it is a folder", "out")
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
    except OSError as error:
        raise _unwritable(folder, error) from error


def write(doc: Mapping[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write the JSON and the page into `folder`, which is made. Raises InvalidRequestError if that fails."""
    paths = folder / JSON_FILE, folder / PAGE_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(as_json(doc), encoding="utf-8")
        paths[1].write_text(page(doc), encoding="utf-8")
    except OSError as error:
        raise _unwritable(folder, error) from error
    return paths


def as_json(doc: Mapping[str, Any]) -> str:
    return json.dumps(doc, indent=2) + "\n"


def _unwritable(folder: Path, error: OSError) -> InvalidRequestError:
    return InvalidRequestError(f"cannot write to {folder}: {error.strerror}; give another `--out`", "out")


class Private:
    """Words that a report must not contain, each with what stands for it."""

    def __init__(self, words: Iterable[tuple[str, str]]) -> None:
        # Longer words first: a home folder contains the user's name.
        self._words = sorted(((w, to) for w, to in words if w), key=lambda pair: -len(pair[0]))

    @classmethod
    def of_this_process(cls, folders: Folders = ()) -> Private:
        """Collect this user's and machine's names, folders, and values of variables named as secrets."""
        known = [
            *folders,
            (Path.home(), "~"),
            (Path.cwd(), "."),
            (os.environ.get("TMPDIR", ""), "TMP"),
            (user_cache(), "CACHE"),
            (sys.prefix, "PREFIX"),
            (sys.base_prefix, "PREFIX"),
            (Path(shortfin_apps.llm.__file__).parents[2], "PACKAGES"),
        ]
        host = socket.gethostname()
        names = [(_user(), "USER"), (host, "HOST"), (host.partition(".")[0], "HOST")]
        words = [(name, to) for folder, to in known for name in _spellings(folder)]
        words += [(name, to) for name, to in names if len(name) > 2 and name not in _COMMON_NAMES]
        words += [
            (value, "SECRET")
            for name, value in os.environ.items()
            if _SECRET.search(name) and len(value) >= _MIN_SECRET_CHARS
        ]
        return cls(words)

    def removed_from(self, value: Any) -> Any:
        """Return a JSON value without private words in its texts. Keys are no one's, and stay."""
        match value:
            case str():
                return self._plain(value)
            case Mapping():
                return {str(key): self.removed_from(each) for key, each in value.items()}
            case list() | tuple():
                return [self.removed_from(each) for each in value]
        return value

    def _plain(self, text: str) -> str:
        for word, to in self._words:
            text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", to, text)
        return text


def _spellings(folder: str | Path) -> set[str]:
    """Return a folder as it is given and as libraries may resolve it; none for a name that is no folder's."""
    given = str(folder)
    found = {given, str(Path(given).absolute()), str(Path(given).resolve())} if given else set()
    return {each for each in found if os.sep in each and each not in _COMMON_FOLDERS}


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return ""
