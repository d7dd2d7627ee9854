"""Which kernels bench/tune_one_launch.py compiles."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from bench.tune_one_launch import Job, _jobs, _kernel, _parse


def test_the_kernel_of_a_build_comes_first_in_each_case() -> None:
    args = _parse(["X", "--model", "1b", "--variant", "132:4:4:512"])
    assert [(job.rows, job.variant) for job in _jobs(args)] == [
        (rows, variant) for rows in (1, 8) for variant in ("", "132:4:4:512")
    ]


@pytest.mark.parametrize(
    ("model", "workgroups", "units"), [("135m", 132, 132), ("8b", 264, 132), ("8b-norms", 132, 132)]
)
def test_large_models_have_two_workgroups_on_a_multiprocessor(
    model: str, workgroups: int, units: int
) -> None:
    kernel, found, _, _ = _kernel(Job("cuda:sm_90", model, "bf16", 8, None, ""))
    assert (kernel.grid, found) == ([workgroups], units)
    assert (kernel.most_shared_bytes is None) == (workgroups == units)


def test_a_variant_has_its_workgroups_waves_stages_depth_and_shares() -> None:
    kernel, _, _, _ = _kernel(Job("cuda:sm_90", "8b", "bf16", 8, None, "66:8:3:1024:3:128"))
    assert kernel.grid == [66]
    assert kernel.tuning.num_waves == 8
    assert (kernel.constexprs["STAGES"], kernel.constexprs["SPLIT"]) == (3, 128)
    tile = kernel.constexprs["DOWN_TILE"]
    assert isinstance(tile, tuple)
    assert tile[1] == 512  # elements of K
