from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def test_every_folder_is_collected(pytestconfig: pytest.Config) -> None:
    """Pytest silently skips folders with certain names."""
    patterns = pytestconfig.getini("norecursedirs")
    folders = {part for file in TESTS.rglob("test_*.py") for part in file.relative_to(TESTS).parts[:-1]}
    assert "builder" in folders
    assert not [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in patterns)]
