"""Which tiles bench/tune_matmul.py compiles, for which numbers of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shortfin_apps.llm.builder.target import Target

pytest.importorskip("triton", reason="Triton is not installed")
from bench.matmul_candidates import CANDIDATES
from bench.tune_matmul import Case, _cases, _jobs, any_tile_of, tile_label

DEVICE = "hip:gfx942"
CASES = {(case.model, case.name): case for case in _cases(None)}


def case(name: str) -> Case:
    return CASES["8b", name]


def test_a_tile_is_read_as_it_is_written() -> None:
    texts = [*CANDIDATES, "8x16x1024:4:4:4:96", "16x16x512:2:6:1:64"]
    assert [tile_label(any_tile_of(text)) for text in texts] == texts


def test_weights_have_the_shapes_of_the_models() -> None:
    shapes = {name: CASES["8b", name].shape for name in ("qkv", "o", "gate_up", "down", "head")}
    assert shapes == {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "head": (128256, 4096),
    }


def test_a_build_has_one_tile_for_each_number_of_tokens() -> None:
    built = [job for job in _jobs(DEVICE, case("o"), [], (1, 16, 64, 2048)) if job.is_built]
    assert sorted(tokens for job in built for tokens in job.tokens) == [1, 16, 64, 2048]


def test_a_tile_is_timed_with_tokens_that_fill_it() -> None:
    tile = any_tile_of("64x64x256:4:4")
    jobs = list(_jobs(DEVICE, case("o"), [tile], (1, 32, 33, 64, 512, 2048)))
    assert [job.tokens for job in jobs if not job.is_built] == [[33, 64, 512]]


def test_a_tile_for_hopper_is_the_built_one_and_timed_with_weights_that_it_takes() -> None:
    hopper = Target("cuda:sm_90", (), "nvptx", "sm_90", frozenset())
    given = case("o")
    assert [tile_label(given.built_tile(hopper, tokens)) for tokens in (128, 512, 2048)] == [
        "64x64x256:4:6",
        "hopper:128:6",
        "hopper:256:4",
    ]
    tiles = [any_tile_of(f"hopper:{columns}:4") for columns in (128, 256)]
    assert given.kernel(DEVICE, tiles[0]).interface.buffers.keys() > {"x", "w", "scratch"}
    for weights, expected in (("bf16", tiles), ("q8_0", [])):
        jobs = _jobs(DEVICE, replace(given, weights=weights), tiles, (64, 2048))
        assert [job.tile for job in jobs if not job.is_built] == expected


def test_a_tile_for_blocks_on_hopper_is_the_built_one_and_timed_with_weights_that_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hopper = Target("cuda:sm_90", (), "nvptx", "sm_90", frozenset())
    monkeypatch.setattr("bench.tune_matmul.resolve_target", lambda device: hopper)
    given = replace(case("gate_up"), weights="q4")
    labels = [tile_label(given.built_tile(hopper, tokens)) for tokens in (32, 64, 128)]
    assert labels == ["32x64x512:4:3:4", "blocks:64:6", "blocks:128:4"]
    tiles = [any_tile_of(label) for label in labels[1:]]
    assert given.kernel(DEVICE, tiles[0]).interface.buffers.keys() > {"x", "w", "scratch"}
    for weights, expected in (("bf16", []), ("q4", tiles)):
        jobs = _jobs(DEVICE, replace(given, weights=weights), tiles, (256, 2048))
        assert [job.tile for job in jobs if not job.is_built] == expected


def test_logits_are_of_few_tokens() -> None:
    jobs = list(_jobs(DEVICE, case("head"), None, (64, 2048)))
    assert {tokens for job in jobs for tokens in job.tokens} == {64}


@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down", "head"])
def test_every_case_is_a_kernel_of_the_model(name: str) -> None:
    kernel = case(name).kernel(DEVICE, any_tile_of("16x32x256:2:2"))
    assert {"x", "w", "tokens"} <= {*kernel.interface.reads, *kernel.interface.constants}
    assert not case(name).absent & kernel.interface.buffers.keys()
