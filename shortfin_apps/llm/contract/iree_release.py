"""The installed releases of IREE; a runtime loads only what its own release's compiler made.

Two are supported: 3.9, the release of shortfin 3.9, and the newest, which runs without shortfin
(docs/iree_releases.md).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple


class Release(NamedTuple):
    """A release of IREE or of shortfin, such as 3.9 for version 3.9.0."""

    major: int
    minor: int

    @classmethod
    def parse(cls, text: str) -> Release:
        """Parses the release of a version, which may be a candidate (`3.13.0rc20261016`)."""
        major, minor, *_ = text.split(".")
        return cls(int(major), int(minor))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


OF_SHORTFIN = Release(3, 9)
HOW_TO_INSTALL_NEWEST = "`make newest-install` sets up an environment with it, .venv-newest"


def compiler_release() -> Release:
    return Release.parse(version("iree-base-compiler"))


def runtime_release() -> Release:
    """Returns the release of `iree.runtime`, which reads every VMFB, also for shortfin."""
    return Release.parse(version("iree-base-runtime"))


def shortfin_release() -> Release | None:
    """Returns shortfin's release, or None if it is not installed."""
    installed = installed_version("shortfin")
    return None if installed is None else Release.parse(installed)


def installed_version(library: str) -> str | None:
    """Returns a library's version, or None if it is not installed: shortfin is optional."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None
