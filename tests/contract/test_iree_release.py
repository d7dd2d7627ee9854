from __future__ import annotations

import pytest
from iree.runtime import version

from shortfin_apps.llm.contract.iree_release import OF_SHORTFIN, Release, compiler_release, runtime_release


@pytest.mark.parametrize(
    ("text", "release"),
    [("3.9.0", OF_SHORTFIN), ("3.13.0rc20261016", Release(3, 13)), ("3.10", Release(3, 10))],
)
def test_a_release_is_the_first_two_numbers_of_a_version(text: str, release: Release) -> None:
    assert Release.parse(text) == release


def test_releases_are_ordered_as_numbers() -> None:
    assert Release(3, 9) < Release(3, 13)
    assert str(Release(3, 13)) == "3.13"


def test_the_compiler_and_the_runtime_are_of_one_release() -> None:
    assert compiler_release() == runtime_release() == Release.parse(version.VERSION)
