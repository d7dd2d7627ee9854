"""Fills a folder with kernels and a script that times them, for a GPU machine without a compiler."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any


def fill(
    folder: Path,
    script: str,
    jobs: Sequence[object],
    compile_job: Callable[..., dict[str, Any] | None],
    num_workers: int,
) -> None:
    """Compile `jobs` in processes, and add the timing `script` with its imports.

    `compile_job` takes a job and the `folder`, writes a kernel into it and returns the kernel's entry for
    `kernels.json`, or None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(num_workers) as pool:
        made = list(pool.map(partial(compile_job, folder=folder), jobs))
    table = [entry for entry in made if entry]
    (folder / "kernels.json").write_text(json.dumps(table))
    for name in (script, "kernel_times.py", "cuda_driver.py"):
        shutil.copy(Path(__file__).parent / name, folder / name)
    print(f"{len(table)} kernels in {folder}; {len(made) - len(table)} do not compile")
