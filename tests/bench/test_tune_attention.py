"""Which attention kernels bench/tune_attention.py compiles."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from bench.tune_attention import DECODE_TILES, MODELS, PREFILL_TILES, _jobs, tile_of

DEVICE = "hip:gfx942"


def test_a_tile_is_read_as_it_is_written() -> None:
    assert [tile_of(text).label for text in DECODE_TILES] == list(DECODE_TILES)
    assert [tile_of(text).label for text in PREFILL_TILES] == [f"{text}:128" for text in PREFILL_TILES]


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_the_tile_of_a_build_comes_first_and_is_not_tried_again(kind: str) -> None:
    jobs = list(_jobs(DEVICE, ["8b"], kind, None))
    assert [job.is_built for job in jobs] == [True] + [False] * (len(jobs) - 1)
    assert len({job.tile.label for job in jobs}) == len(jobs)


@pytest.mark.parametrize("model", MODELS)
def test_kernels_have_the_tile_that_is_tried(model: str) -> None:
    decode, prefill = (
        next(job for job in _jobs(DEVICE, [model], kind, [tile_of("16x256:2:3:512")]) if not job.is_built)
        for kind in ("decode", "prefill")
    )
    kernels = decode.kernel(), prefill.kernel()
    assert [kernel.constexprs["COLUMNS"] for kernel in kernels] == [256, 256]
    assert [(kernel.tuning.num_waves, kernel.tuning.num_stages) for kernel in kernels] == [(2, 3)] * 2
    assert kernels[0].constexprs["SPLIT"] == 512
    assert "offsets" not in kernels[0].interface.buffers
