"""Prefills and decodes of `random:tiny` on emulated GPUs, against the CPU's tokens, and bit by bit.

    python -m tests.integration.hip_sample FOLDER

The emulated GPU belongs to a process, so test_hip_sample.py runs this in one of its own.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder.builder import build
from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.hip import EmulatedGpus
from tests.integration.generation import Continuation, assert_all_same, generate, open_engine
from tests.integration.test_hip_receipts import ways_of

CHIP = "gfx942"  # `make amd` and `make slow` have the others
TOLERANCE = 0.1  # both are rounded to bf16, at other places
MAX_TOKENS = 6
PROMPTS = [[(7 * index + 3 * length) % 250 for index in range(length)] for length in (1, 16, 63, 130)]
SIZES = BuildOptions(prefill_batch_sizes=(2,), decode_batch_sizes=(4,))


def tokens_of(artifact: Artifact, options: EngineSettings) -> list[Continuation]:
    with open_engine(artifact, options) as engine:
        return generate(engine, PROMPTS, MAX_TOKENS)


def main(folder: Path) -> None:
    expected = tokens_of(build("random:tiny", folder / "cpu", SIZES, QuietProgress()), EngineSettings())
    gpus = EmulatedGpus()
    artifact = build("random:tiny", folder / CHIP, replace(SIZES, device=f"hip:{CHIP}"), QuietProgress())
    with gpus.watch(CHIP):
        got = tokens_of(artifact, EngineSettings(device="hip"))
        in_chunks, alone = ways_of(artifact, gpus, 140, CHIP)
    assert_all_same(expected, got, TOLERANCE, MAX_TOKENS)
    assert len(in_chunks | alone) == 1, "a token has other bits in a decode than in a prefill"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
