"""What tests compile: each thing is compiled once, for all processes and runs of the tests.

All lies in the user's cache, where entries are named by what made them and may be made by several processes
at a time: programs in the build cache, Triton's code objects in Triton's own (TRITON_CACHE_DIR, which
conftest.py sets), translations of the emulated GPU in its own. A session removes what is beyond MAX_BYTES.
"""

from __future__ import annotations

import shutil
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
    """Removes what was not used, or made, for longest, of each kind; what another process makes stays."""
    programs = [held for held in contents(user_cache()) if held.kind == KIND]
    for held in to_remove(programs, time.time(), None, max_bytes):
        remove(held)
    for folder in (user_cache() / "triton", user_cache() / "emulated-gpu" / "programs"):
        _bound_folders(folder, max_bytes)


def _bound_folders(folder: Path, max_bytes: int) -> None:
    """Of the folders in `folder`, keeps those that were changed last."""
    kept = 0
    for each in sorted(folder.glob("*/"), key=lambda path: -path.stat().st_mtime):
        kept += sum(file.stat().st_size for file in each.iterdir())
        if kept > max_bytes:
            shutil.rmtree(each)
