"""Which attention kernels bench/tune_attention.py compiles."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from bench.tune_attention import MODELS, TILES, Kind, _jobs, tile_of
from shortfin_apps.llm.builder import target as target_module
from shortfin_apps.llm.builder.kernels.triton import byte_attention
from shortfin_apps.llm.builder.kernels.triton.attention import attend_singles

DEVICE = "hip:gfx942"


def test_a_tile_is_read_as_it_is_written() -> None:
    for kind in ("decode", "batch"):
        assert [tile_of(text).label for text in TILES[kind]] == list(TILES[kind])
    assert [tile_of(text).label for text in TILES["prefill"]] == [f"{text}:128" for text in TILES["prefill"]]


@pytest.mark.parametrize("kind", TILES)
def test_the_tile_of_a_build_comes_first_and_is_not_tried_again(kind: Kind) -> None:
    jobs = list(_jobs(DEVICE, ["8b"], kind, None))
    assert [job.is_built for job in jobs] == [True] + [False] * (len(jobs) - 1)
    assert len({job.tile.label for job in jobs}) == len(jobs)


@pytest.mark.parametrize("model", MODELS)
def test_kernels_have_the_tile_that_is_tried(model: str) -> None:
    tile = tile_of("16x256:2:3:512")
    kernels = [job.kernel() for job in _jobs(DEVICE, [model], None, [tile]) if not job.is_built]
    assert len(kernels) == len(TILES)
    for kernel in kernels:
        assert kernel.constexprs["COLUMNS"] == 256
        assert (kernel.tuning.num_waves, kernel.tuning.num_stages) == (2, 3)
    for kernel in kernels[:2]:
        assert kernel.constexprs["SPLIT"] == 512
        assert "offsets" not in kernel.interface.buffers


def test_a_batch_over_a_cache_in_bytes_has_the_form_that_a_build_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target_module, "compiler_release", lambda: (3, 13))  # 3.9 has no NVIDIA GPUs
    forms: dict[Kind, object] = {"decode": attend_singles, "batch": byte_attention.attend_singles}
    for kind, form in forms.items():
        jobs = _jobs("cuda:sm_90", ["8b"], kind, [tile_of("16x32:1:3:64")], kv="q8_0")
        assert [job.kernel().function for job in jobs] == [form, attend_singles]
    tile = tile_of("16x64:2:5:1024")
    jobs = _jobs("cuda:sm_90", ["8b"], "batch", [tile], kv="q8_0")
    assert [job.label for job in jobs] == [f"{tile.label}:gluon", tile.label]
