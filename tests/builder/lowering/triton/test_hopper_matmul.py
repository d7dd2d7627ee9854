"""The choice of the form for Hopper of a matmul, and its operands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from shortfin_apps.llm.builder.graph.batch import Slab
from shortfin_apps.llm.builder.graph.emitter import Bounded, Dim, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.layout import BlockRows, Fp8Rows, WeightLayout
from shortfin_apps.llm.model.operations import Activation
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec
from shortfin_apps.llm.model.weight_blocks import Q4_1
from tests.builder.compiled_model import TINY
from tests.builder.specs import changed, page_elements

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.kernels.triton import hopper_matmul
from shortfin_apps.llm.builder.lowering.triton.hopper_matmul import (
    HopperTile,
    hopper_form,
    hopper_tile,
    takes,
)
from shortfin_apps.llm.builder.lowering.triton.matmul import MatmulKernels
from shortfin_apps.llm.builder.lowering.triton.tiles import tiles_of

HOPPER = Target("cuda:sm_90", (), "nvptx", "sm_90", frozenset())
FP8 = Fp8Rows("f8E4M3FN")
LLAMA = changed(TINY, {"hidden_size": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128})
QKV, OUTPUT, GATE_UP, DOWN = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)


def kernels_of(spec: ModelSpec = LLAMA, **options: Any) -> MatmulKernels:
    return MatmulKernels(spec, BuildOptions(**options), tiles_of(HOPPER).matmul)


def qkv(
    tokens: Dim, layout: WeightLayout | None = None, absent: str = "bias head_norm", **given: Any
) -> Kernel:
    spec = changed(LLAMA, given.pop("spec", {}))
    options = BuildOptions(**given)
    dtype = "bf16" if options.kv == "bf16" else "i8"
    slab = Slab(
        pool="whole",
        layers=range(len(spec.layers)),
        blocks=Tensor("%blocks", ("rows", "width"), "i64"),
        cache=Tensor("%cache", ("pages", page_elements(spec, options)), dtype),
    )
    shape = (spec.attention.qkv_features, 4096)
    made = kernels_of(spec, **given).project_qkv(spec.attention, shape, tokens, slab, layout)
    return made.without(set(absent.split()))


def qkv_in_bytes(tokens: Dim, layout: WeightLayout | None = None) -> Kernel:
    """With biases and norms of heads, and a cache in bytes."""
    return qkv(tokens, layout, absent="", kv="q8_0")


def gate_up(
    tokens: Dim,
    layout: WeightLayout | None = None,
    shape: tuple[int, int] = GATE_UP,
    activation: Activation = "silu",
) -> Kernel:
    return kernels_of().gated_linear(activation, shape, tokens, layout)


def linear(tokens: Dim, layout: WeightLayout | None = None, shape: tuple[int, int] = OUTPUT) -> Kernel:
    return kernels_of().linear(shape, tokens, layout).without({"in_squares"})


def columns(kernel: Kernel, tokens: Dim) -> int | None:
    tile = hopper_tile(kernel, tokens)
    return None if tile is None else tile.columns


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (128, [None, None, None, None]),
        (129, [128, 64, 256, 64]),
        (256, [128, 64, 256, 64]),
        (320, [256, 128, 256, 128]),
        (512, [256, 128, 128, 128]),
        (1000, [128, 256, 256, 256]),
        (2048, [256, 256, 256, 256]),
        ("%tokens", [256, 128, 128, 128]),
    ],
)
def test_tiles_in_bf16_are_the_ones_that_were_fastest(tokens: Dim, expected: list[int | None]) -> None:
    kernels = [qkv(tokens), linear(tokens), gate_up(tokens), linear(tokens, shape=DOWN)]
    assert [columns(kernel, tokens) for kernel in kernels] == expected


@pytest.mark.parametrize(
    ("tokens", "narrow"), [(192, 64), (256, 64), (257, 128), (2048, 128), ("%tokens", 128)]
)
def test_tiles_in_8_bit_floats_have_at_most_128_columns(tokens: Dim, narrow: int) -> None:
    kernels = [qkv(tokens, FP8), gate_up(tokens, FP8), linear(tokens, FP8), linear(tokens, FP8, shape=DOWN)]
    assert [columns(kernel, tokens) for kernel in kernels] == [128, 128, narrow, narrow]


def test_a_tile_has_one_head_or_two() -> None:
    """As in gpt-oss (heads of 64) and Qwen (128); Gemma's heads of 256 are faster with the other kernel."""
    sizes = {64: (64, 16), 128: (32, 8), 256: (16, 4)}
    given = {
        size: qkv(512, spec={"heads": heads, "kv_heads": kv_heads, "head_dim": size})
        for size, (heads, kv_heads) in sizes.items()
    }
    tiles = [HopperTile(256, 4), HopperTile(128, 6), HopperTile(64, 8)]
    taken = {size: [tile.columns for tile in tiles if takes(kernel, tile)] for size, kernel in given.items()}
    assert taken == {64: [128, 64], 128: [256, 128], 256: []}


def test_a_small_k_need_not_be_a_multiple_of_a_load_of_partial_sums() -> None:
    """As in gpt-oss, with 2,880 features."""
    assert columns(linear(512, shape=(5120, 2880)), 512) == 256


def test_narrow_tiles_are_used_only_if_all_are_computed_at_the_same_time() -> None:
    """Those of gpt-oss' output projection: 45 for each 128 tokens."""
    assert [columns(linear(tokens, shape=(2880, 4096)), tokens) for tokens in (256, 257)] == [64, None]


REFUSED: Mapping[str, Kernel] = {
    "columns that do not fill tiles": linear(512, shape=(4096 + 32, 4096)),
    "K that loads do not fill": linear(512, shape=(4096, 4096 + 32)),
    "K in 8-bit floats that loads do not fill": linear(512, FP8, shape=(4096, 4096 + 64)),
    "a small K": linear(512, shape=(4096, 1536)),
    "weights in blocks": linear(512, BlockRows(Q4_1)),
    "another type of 8-bit floats": linear(512, Fp8Rows("f8E4M3FNUZ")),
    "floats that were not measured": kernels_of(weights="f16").linear(OUTPUT, 512),
    "heads of another size": qkv(512, spec={"heads": 128, "kv_heads": 32, "head_dim": 32}),
}


@pytest.mark.parametrize("kernel", REFUSED.values(), ids=REFUSED.keys())
def test_what_the_form_does_not_compute_stays_with_the_other_kernel(kernel: Kernel) -> None:
    assert hopper_form(kernel, 512) is kernel


@pytest.mark.parametrize("tokens", [None, 128, Bounded("%rows", 256)])
def test_few_tokens_stay_with_the_other_kernel(tokens: Dim | None) -> None:
    kernel = linear(512)
    assert hopper_form(kernel, tokens) is kernel


FORMED = [
    qkv(512),
    qkv(512, absent="head_norm"),
    qkv(512, absent="bias"),
    qkv_in_bytes(512),
    linear(512),
    gate_up(512),
    gate_up(512, activation="gelu"),
    linear(512, FP8),
]


@pytest.mark.parametrize("kernel", FORMED)
def test_the_form_has_the_operands_of_the_other_kernel_and_a_scratch(kernel: Kernel) -> None:
    made = hopper_form(kernel, 512)
    assert made.function in (hopper_matmul.linear, hopper_matmul.gated_linear, hopper_matmul.project_qkv)
    [scratch] = made.interface.buffers.items() - kernel.interface.buffers.items()
    assert scratch[0] == list(made.interface.buffers)[-1] == "scratch"
    assert kernel.interface.buffers.items() < made.interface.buffers.items()
    given = {*made.interface.buffers, *made.interface.constants, *made.constexprs}
    assert given == set(made.function.arg_names)


def test_there_are_as_many_workgroups_as_tiles_or_multiprocessors() -> None:
    assert hopper_form(linear(512), 512).grid == [Tiles("tokens", 128, times=32, most=132)]
    assert hopper_form(gate_up(2048), 2048).grid == [Tiles("tokens", 128, times=112, most=132)]


def test_tiles_of_one_matmul_have_names_of_their_own() -> None:
    names = {hopper_form(linear(tokens), tokens).name for tokens in (512, 1000)}
    assert names == {
        "linear_4096x4096_hopper_128x128_without_in_squares",
        "linear_4096x4096_hopper_128x256_without_in_squares",
    }
