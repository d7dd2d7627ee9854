"""The runtimes as parameters of tests; those on shortfin are skipped where it is not installed."""

from __future__ import annotations

import pytest

from shortfin_apps.llm.components.runtime.open import has_shortfin
from shortfin_apps.llm.contract.iree_release import OF_SHORTFIN, compiler_release

needs_shortfin = pytest.mark.skipif(not has_shortfin(), reason="shortfin is not installed")
SHORTFIN = pytest.param("shortfin", marks=needs_shortfin)
RUNTIMES = ("iree", SHORTFIN)

of_shortfins_release = pytest.mark.skipif(
    compiler_release() != OF_SHORTFIN, reason=f"is about what the compiler of IREE {OF_SHORTFIN} makes"
)
