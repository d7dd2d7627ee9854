"""The installed releases of IREE. A runtime loads only VMFBs of the compiler of the same release.

Two releases are supported: 3.9, which shortfin 3.9 needs, and the newest, which runs without shortfin
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
        """Return the release of a version, such as 3.13 of the release candidate `3.13.0rc20261016`."""
        major, minor, *_ = text.split(".")
        return cls(int(major), int(minor))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


OF_SHORTFIN = Release(3, 9)
HOW_TO_INSTALL_NEWEST = "`make newest-install` sets up an environment with it, .venv-newest"


def compiler_release() -> Release:
    return Release.parse(version("iree-base-compiler"))


def runtime_release() -> Release:
    """Return the release of `iree.runtime`, which reads every VMFB, even if shortfin executes it."""
    return Release.parse(version("iree-base-runtime"))


def shortfin_release() -> Release | None:
    """Return shortfin's release, or None if shortfin is not installed."""
    installed = installed_version("shortfin")
    return None if installed is None else Release.parse(installed)


def installed_version(library: str) -> str | None:
    """Return a library's version, or None if the library is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None
