"""The Kernels of matmuls: what they have in common, and that AMD GPUs have registers for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shortfin_apps.llm.builder.graph.emitter import Dim
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import buffer
from shortfin_apps.llm.builder.model.spec import BuildOptions
from shortfin_apps.llm.builder.quantise import Bits
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.gpu_code.code_object import read_code_object
from tests.builder.compiled_model import TINY
from tests.hip import CHIPS

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import compile_kernel
from shortfin_apps.llm.builder.lowering.triton.matmul import MatmulKernels
from shortfin_apps.llm.builder.lowering.triton.tiles import MatmulTile, tiles_of

SPEC = replace(TINY, hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
QKV, GATE_UP = (960, 576), (3072, 576)


def kernels_of(kernels: MatmulKernels, tokens: Dim, bits: Bits | None = None) -> list[Kernel]:
    qkv = kernels.project_qkv(QKV, tokens, bits).without({"bias"})
    return [qkv, kernels.gated_linear(GATE_UP, tokens, bits), kernels.linear((576, 1536), tokens, bits)]


def test_a_grid_covers_all_tokens_and_features() -> None:
    tile = MatmulTile(32, 128, 256, Tuning())
    kernels = MatmulKernels(SPEC, BuildOptions(), lambda *_: tile)
    assert [list(kernel.grid) for kernel in kernels_of(kernels, 40)] == [
        [Tiles("tokens", 32), 8],
        [Tiles("tokens", 32), 24],
        [Tiles("tokens", 32), 5],
    ]
    assert {kernel.constexprs["DEPTH"] for kernel in kernels_of(kernels, 40)} == {128}


def test_a_tile_is_chosen_by_tokens_and_by_shape() -> None:
    asked: list[tuple[Dim, tuple[int, ...]]] = []

    def tile_of(tokens: Dim, shape: tuple[int, ...]) -> MatmulTile:
        asked.append((tokens, shape))
        return MatmulTile(16, 16, 64, Tuning())

    kernels_of(MatmulKernels(SPEC, BuildOptions(), tile_of), "tokens")
    assert asked == [("tokens", QKV), ("tokens", GATE_UP), ("tokens", (576, 1536))]


def test_weights_in_blocks_have_operands_for_their_terms() -> None:
    kernels = MatmulKernels(SPEC, BuildOptions(weights="q4"), lambda *_: MatmulTile(16, 16, 64, Tuning()))
    by_bits = {bits: kernels.linear((576, 1536), 1, bits) for bits in (None, 8, 4)}
    stored = {
        bits: {name: kernel.interface.reads.get(name) for name in ("w", "scales", "minima")}
        for bits, kernel in by_bits.items()
    }
    scales = buffer("f16", 576, 48)
    assert stored == {
        None: {"w": buffer("bf16", 576, 1536), "scales": None, "minima": None},
        8: {"w": buffer("i8", 576, 1536), "scales": scales, "minima": None},
        4: {"w": buffer("i8", 576, 768), "scales": scales, "minima": scales},
    }
    assert len({kernel.name for kernel in by_bits.values()}) == 3


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("tokens", [16, 32, 64, 512])
@pytest.mark.parametrize("chip", CHIPS)
def test_no_registers_are_spilled(chip: str, tokens: int, bits: Bits | None) -> None:
    device = f"hip:{chip}"
    kernels = MatmulKernels(SPEC, BuildOptions(device=device), tiles_of(resolve_target(device)).matmul)
    for kernel in kernels_of(kernels, tokens, bits):
        code = compile_kernel(kernel, "amdgpu", chip)
        for compiled in read_code_object(code.image).kernels:
            assert (compiled.num_vgpr_spills, compiled.num_sgpr_spills) == (0, 0), kernel.name
