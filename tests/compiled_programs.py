"""Programs that tests compile: each is compiled once, for all processes and runs of the tests.

They lie in the user's build cache, whose entries are named by what made them and may be made by several
processes at a time. A test session removes those that were not used for longest, beyond MAX_BYTES.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path

from shortfin_apps.llm.artifact import file_names
from shortfin_apps.llm.builder.cache import BUILD, BuildCache, Use, content_key, user_cache
from shortfin_apps.llm.builder.cache_contents import contents, remove, to_remove
from shortfin_apps.llm.builder.program.compiler import compile_text
from shortfin_apps.llm.builder.target import Target

KIND = "test"
MAX_BYTES = 2_000_000_000


def compile_program(text: str, target: Target) -> Path:
    """The VMFB of MLIR `text`. It belongs to the cache, and is read only."""
    key = content_key(text, target.flags, target.cpu, sorted(target.features), version("iree-base-compiler"))

    def make(folder: Path) -> None:
        compile_text(text, target.flags, folder / file_names.VMFB)

    entry = BuildCache(user_cache() / BUILD).get_or_make(KIND, key, make, Use("tests", target.device))
    return entry.directory / file_names.VMFB


def bound_cache(max_bytes: int = MAX_BYTES) -> None:
    """Removes the programs that were not used for longest; what another process is making stays."""
    programs = [held for held in contents(user_cache()) if held.kind == KIND]
    for held in to_remove(programs, time.time(), None, max_bytes):
        remove(held)
