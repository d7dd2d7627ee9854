"""The Kernels of matmuls: what they have in common, and that AMD GPUs have registers for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emulated_gpu.machine_code.code_object import read_code_object
from shortfin_apps.llm.builder.graph.batch import Slab
from shortfin_apps.llm.builder.graph.emitter import Dim, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import compile_kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import buffer
from shortfin_apps.llm.builder.kernels.triton import FP8_GROUP
from shortfin_apps.llm.builder.lowering.triton.matmul import MatmulKernels
from shortfin_apps.llm.builder.lowering.triton.tiles import MatmulTile, tiles_of
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.builder.weights.layout import BlockRows, Fp8Rows, RowMajor, WeightLayout
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.model.weight_blocks import Q4_1, Q8_0, BlockType
from tests.builder.compiled_model import TINY
from tests.builder.specs import changed, page_elements
from tests.hip import CHIPS

pytest.importorskip("triton", reason="Triton is not installed")

SPEC = changed(TINY, {"hidden_size": 576, "heads": 9, "kv_heads": 3, "head_dim": 64})
GFX942 = resolve_target("hip:gfx942")
HOPPER = replace(GFX942, architecture="nvptx", cpu="sm_90")
QKV, GATE_UP = (960, 576), (3072, 576)
SLAB = Slab(
    pool="whole",
    layers=range(len(SPEC.layers)),
    blocks=Tensor("%blocks", ("rows", "width"), "i64"),
    cache=Tensor("%cache", ("pages", page_elements(SPEC, BuildOptions())), "bf16"),
)
KINDS = (Q8_0, Q4_1, BlockType(8, 16, group=256), BlockType(4, has_minima=True, group=256))
LAYOUTS: list[WeightLayout] = [BlockRows(Q8_0), BlockRows(Q4_1), Fp8Rows("f8E4M3FN")]  # besides floats


def kernels_of(kernels: MatmulKernels, tokens: Dim, layout: WeightLayout | None = None) -> list[Kernel]:
    qkv = kernels.project_qkv(SPEC.attention, QKV, tokens, SLAB, layout).without({"bias", "head_norm"})
    return [
        qkv,
        kernels.gated_linear("silu", GATE_UP, tokens, layout),
        kernels.linear((576, 1536), tokens, layout),
    ]


def size_of(kernel: Kernel, name: str) -> int:
    size = kernel.constexprs[name]
    assert isinstance(size, int)
    return size


def test_a_grid_covers_all_tokens_and_features() -> None:
    tile = MatmulTile(32, 128, 256, Tuning())
    kernels = MatmulKernels(SPEC, BuildOptions(), lambda *_: tile)
    assert [list(kernel.grid) for kernel in kernels_of(kernels, 40)] == [
        [Tiles("tokens", 32), 8],
        [Tiles("tokens", 32), 24],
        [Tiles("tokens", 32), 5],
    ]
    assert {kernel.constexprs["DEPTH"] for kernel in kernels_of(kernels, 40)} == {128}


def test_a_tile_is_chosen_by_tokens_and_by_the_shape_and_layout_of_a_weight() -> None:
    asked: list[tuple[Dim, tuple[int, ...], WeightLayout | None]] = []

    def tile_of(tokens: Dim, shape: tuple[int, ...], layout: WeightLayout | None) -> MatmulTile:
        asked.append((tokens, shape, layout))
        return MatmulTile(16, 16, 64, Tuning())

    kernels = MatmulKernels(SPEC, BuildOptions(), tile_of)
    kernels_of(kernels, "tokens")
    kernels.linear((576, 576), 4, BlockRows(Q4_1))
    shapes = QKV, GATE_UP, (576, 1536)
    floats = [("tokens", shape, RowMajor("bf16")) for shape in shapes]
    assert asked == [*floats, (4, (576, 576), BlockRows(Q4_1))]


def test_weights_have_operands_for_their_terms() -> None:
    kernels = MatmulKernels(SPEC, BuildOptions(), lambda *_: MatmulTile(16, 16, 64, Tuning()))
    made = [kernels.linear((576, 1536), 1, layout) for layout in (None, *LAYOUTS)]
    stored = [[kernel.interface.reads.get(name) for name in ("w", "scales", "minima")] for kernel in made]
    terms = buffer("f16", 576, 48)
    assert stored == [
        [buffer("bf16", 576, 1536), None, None],
        [buffer("i8", 576, 1536), terms, None],
        [buffer("i8", 576, 768), terms, terms],
        [buffer("f8E4M3FN", 576, 1536), buffer("f32", 576), None],
    ]
    assert len({kernel.name for kernel in made}) == len(made)


def test_activations_in_8_bit_floats_are_taken_in_whole_groups() -> None:
    kernels = MatmulKernels(SPEC, BuildOptions(), tiles_of(resolve_target("hip:gfx950")).matmul)
    for tokens in (1, 32, 64, 512):
        for kernel in kernels_of(kernels, tokens, Fp8Rows("f8E4M3FN")):
            assert size_of(kernel, "DEPTH") % FP8_GROUP == 0


@pytest.mark.parametrize("layout", [None, BlockRows(Q4_1), Fp8Rows("f8E4M3FN")])
@pytest.mark.parametrize("head_dim", [40, 128, 256])
def test_a_tile_has_whole_heads_where_they_have_a_norm(layout: WeightLayout | None, head_dim: int) -> None:
    spec = changed(SPEC, {"head_dim": head_dim, "qk_norm": True})
    kernels = MatmulKernels(spec, BuildOptions(), tiles_of(resolve_target("hip:gfx950")).matmul)
    for tokens in (1, 32, 64, 512):
        kernel = kernels.project_qkv(spec.attention, (15 * head_dim, 576), tokens, SLAB, layout)
        columns, head_columns = size_of(kernel, "COLUMNS"), size_of(kernel, "HEAD_COLUMNS")
        assert head_dim <= head_columns < 2 * head_dim
        assert columns % head_columns == 0
        assert kernel.grid[1] == -(-15 * head_columns // columns)


@pytest.mark.parametrize("target", [GFX942, HOPPER], ids=["gfx942", "sm_90"])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("layout", [None, BlockRows(Q4_1), BlockRows(Q4_1, terms_in_bf16=True)])
def test_one_name_is_one_kernel_where_tiles_are_widened(
    target: Target, head_dim: int, layout: BlockRows | None
) -> None:
    spec = changed(SPEC, {"head_dim": head_dim, "qk_norm": True})
    kernels = MatmulKernels(spec, BuildOptions(), tiles_of(target).matmul)
    by_name: dict[str, Kernel] = {}
    for tokens in (1, 16, 32, 64, 128, 512, "tokens"):
        kernel = kernels.project_qkv(spec.attention, (15 * head_dim, 576), tokens, SLAB, layout)
        assert by_name.setdefault(kernel.name, kernel) == kernel


@pytest.mark.parametrize("head_dim", [128, 256])
def test_the_sums_of_a_widened_tile_fit_in_registers_with_weights_in_blocks(head_dim: int) -> None:
    """A thread has 128 of them, or 64 if each wave has a part of K; limits are of tiles as they were."""
    spec = changed(SPEC, {"head_dim": head_dim, "qk_norm": True})
    kernels = MatmulKernels(spec, BuildOptions(), tiles_of(HOPPER).matmul)
    for tokens in (1, 16, 32, 64, 128, 512):
        layout = BlockRows(Q4_1, terms_in_bf16=True)
        kernel = kernels.project_qkv(spec.attention, (15 * head_dim, 576), tokens, SLAB, layout)
        rows, columns, parts = (size_of(kernel, name) for name in ("ROWS", "COLUMNS", "PARTS"))
        sums = rows * columns // (32 if parts > 1 else 32 * kernel.tuning.num_waves)
        assert sums <= (64 if parts > 1 else 128)
        assert kernel.tuning.max_registers is None
        assert kernel.grid[0] == Tiles("tokens", rows)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [16, 512])
@pytest.mark.parametrize("chip", CHIPS)
def test_norms_of_heads_spill_no_registers(chip: str, tokens: int) -> None:
    spec, device = changed(SPEC, {"head_dim": 128, "qk_norm": True}), f"hip:{chip}"
    kernels = MatmulKernels(spec, BuildOptions(device=device), tiles_of(resolve_target(device)).matmul)
    expect_no_spills(kernels.project_qkv(spec.attention, (1920, 576), tokens, SLAB), chip)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "layout", "tokens"),
    [
        *((chip, None, tokens) for chip in CHIPS for tokens in (16, 32, 64, 512)),
        *((chip, BlockRows(kind), tokens) for chip in CHIPS for kind in KINDS for tokens in (16, 512)),
        *(("gfx942", Fp8Rows("f8E4M3FNUZ"), tokens) for tokens in (16, 512)),
        *(("gfx950", Fp8Rows("f8E4M3FN"), tokens) for tokens in (16, 512)),
    ],
)
def test_no_registers_are_spilled(chip: str, layout: WeightLayout | None, tokens: int) -> None:
    device = f"hip:{chip}"
    target = resolve_target(device)
    kernels = MatmulKernels(SPEC, BuildOptions(device=device), tiles_of(target).matmul)
    for kernel in kernels_of(kernels, tokens, layout):
        expect_no_spills(kernel, chip)


def expect_no_spills(kernel: Kernel, chip: str) -> None:
    code = compile_kernel(kernel, "amdgpu", chip)
    for compiled in read_code_object(code.image).kernels:
        assert (compiled.num_vgpr_spills, compiled.num_sgpr_spills) == (0, 0), kernel.name
