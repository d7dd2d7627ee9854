"""Which kernels bench/tune_experts.py compiles, for which numbers of tokens."""

from __future__ import annotations

from argparse import Namespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from bench.tune_experts import CANDIDATES, MATMULS, OTHERS, TOKENS, Job, _jobs
from bench.tune_matmul import tile_label, tile_of

DEVICE = "hip:gfx942"


def jobs(**changed: object) -> list[Job]:
    given = {"device": DEVICE, "only": "", "tokens": TOKENS, "tile": None, **changed}
    return list(_jobs(Namespace(**given)))


def test_a_tile_is_read_as_it_is_written() -> None:
    assert [tile_label(tile_of(text)) for text in CANDIDATES] == list(CANDIDATES)


def test_every_number_of_tokens_has_each_kernel() -> None:
    for kind in MATMULS + OTHERS:
        assert {tokens for job in jobs() if job.kind == kind for tokens in job.tokens} == set(TOKENS)


def test_a_tile_is_timed_with_tokens_whose_experts_have_about_its_rows() -> None:
    tiles = [tile_of("16x64x256:4:4"), tile_of("128x64x128:4:4")]
    small, large = jobs(only="gated", tile=tiles)
    assert small.tokens == [1, 8, 64, 256, 512]
    assert large.tokens == [256, 512, 2048]


@pytest.mark.parametrize("kind", MATMULS + OTHERS)
def test_every_kind_is_a_kernel_of_the_model(kind: str) -> None:
    kernel = jobs(only=kind, tile=[tile_of("16x32x256:2:2")])[0].kernel
    assert kernel.grid
    assert kernel.interface.writes
    assert kernel.constexprs["COUNT" if kind != "sort" else "ROWS"] == (32 if kind != "sort" else 16)
