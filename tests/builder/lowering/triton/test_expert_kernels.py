"""The Kernels of routed experts, and that their loads and registers are what GPUs are good at."""

from __future__ import annotations

import re

import pytest

from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.layout import BlockRows, RowMajor
from shortfin_apps.llm.model.feed_forward import MoE
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec
from shortfin_apps.llm.model.weight_blocks import MXFP4, Q4_1, BlockType
from tests.builder.compiled_model import TINY
from tests.builder.lowering.triton.test_matmul import expect_no_spills
from tests.hip import CHIPS

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import compile_kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.lowering.triton.expert_kernels import ExpertKernels
from shortfin_apps.llm.builder.lowering.triton.tiles import MatmulTile, tiles_of
from tests.builder.specs import changed, with_experts

# gpt-oss's width, of which 64 is the largest power of two.
EXPERTS = MoE(count=5, per_token=2, features=2880, biases=True)
SPEC: ModelSpec = changed(with_experts(TINY, EXPERTS), {"hidden_size": 2880, "activation": "clamped"})
BLOCKS = pytest.mark.parametrize("blocks", [MXFP4, Q4_1], ids=str)
TILE = MatmulTile(16, 64, 256, Tuning(4, 4))


def matmuls(layout: BlockRows | RowMajor, tile: MatmulTile) -> list[Kernel]:
    kernels = ExpertKernels(SPEC, BuildOptions(), EXPERTS)
    return [kernels.gated(layout, tile), kernels.multiply(layout, tile)]


def test_a_grid_covers_all_tiles_and_features() -> None:
    gated, multiply = matmuls(RowMajor("bf16"), TILE)
    assert [list(gated.grid), list(multiply.grid)] == [[Tiles("tiles"), 90], [Tiles("tiles"), 45]]
    assert (gated.constexprs["OUT"], multiply.constexprs["OUT"]) == (2880, 2880)


@BLOCKS
def test_weights_are_loaded_ahead_by_whole_words_where_tiles_do_not_divide_them(blocks: BlockType) -> None:
    """Loads of single bytes are neither pipelined nor quick."""
    for kernel in matmuls(BlockRows(blocks), TILE):
        text = compile_kernel(kernel, "nvptx", "sm_90").image.decode()
        assert not re.search(r"ld\.global[\w.]*\.[bsu]8\b", text)
        assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", text)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("tokens", [1, 32, 128])
def test_floats_of_4_bits_spill_no_registers(chip: str, tokens: int) -> None:
    layout, table = BlockRows(MXFP4), tiles_of(resolve_target(f"hip:{chip}"))
    for shape, number in (((5760, 2880), 0), ((2880, 2880), 1)):
        expect_no_spills(matmuls(layout, table.matmul(tokens, shape, layout))[number], chip)
