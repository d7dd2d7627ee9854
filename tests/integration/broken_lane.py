"""An emulated GPU with a lane that computes exponentials wrong, when it is told to: what notices it.

    python -m tests.integration.broken_lane DIR FOLDER

Writes to stdout, as JSON, the checks that noticed the lane and those that did not, with their seconds: of a
sound GPU, of a server that started with a `small` or a `large` error, of one that packs tokens of several
requests (extend-attention), and of one whose GPU broke `later`. The GPU's library is changed, so it needs a
process of its own. FOLDER is empty.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from emulated_gpu.library import SOURCES, EmulatedGpu, compile_library
from shortfin_apps.llm.tools.replay.in_process import EXTEND
from tests.integration.damaged_server import Bench, Damage, Observed

LANE = 13
SMALL, LARGE = 1.5, 1000.0  # what its exponentials are multiplied by
OPERATION = "X(v_exp_f32, exp2_of(a))"
BROKEN = f"X(v_exp_f32, exp2_of(a) * (l == {LANE} ? factor_of_a_lane : 1))"
SWITCH = '__attribute__((weak, visibility("default"))) float factor_of_a_lane = 1;\n'
FILE = "wave/vector_float.c"


def changed_library(folder: Path) -> Path:
    sources = Path(shutil.copytree(SOURCES, folder / "emulated_gpu"))
    text = (sources / FILE).read_text()
    assert text.count(OPERATION) == 1
    text = text.replace(OPERATION, BROKEN).replace("#define UNARY", f"{SWITCH}#define UNARY", 1)
    (sources / FILE).write_text(text)
    return compile_library(sources, folder / "library")


def main(directory: Path, folder: Path) -> None:
    library = changed_library(folder)
    os.environ["EMULATED_GPU_LIBRARY"] = str(library)
    os.environ.update(EmulatedGpu().environment())
    factor = ctypes.c_float.in_dll(ctypes.CDLL(str(library)), "factor_of_a_lane")

    def switch(to: float) -> Callable[..., None]:
        def act(*_: object) -> None:
            factor.value = to

        return act

    def observe(name: str, damage: Damage, mode: str = "default") -> Observed:
        (folder / name).mkdir()
        return Bench(directory, folder / name, "hip", mode, max_tokens=4).observe(damage)

    mend = switch(1.0)
    found = {
        "sound": observe("sound", Damage(running=mend)),
        "small": observe("small", Damage(before=switch(SMALL), undo=mend)),
        "large": observe("large", Damage(before=switch(LARGE), undo=mend)),
        "packed": observe("packed", Damage(before=switch(SMALL), undo=mend), EXTEND),
        "sound packed": observe("sound packed", Damage(running=mend), EXTEND),
        "later": observe("later", Damage(running=switch(SMALL), undo=mend)),
    }
    print(json.dumps({name: [observed.caught, observed.seconds] for name, observed in found.items()}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
