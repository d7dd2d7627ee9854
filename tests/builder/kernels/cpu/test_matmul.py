from __future__ import annotations

from dataclasses import replace

import pytest

from shortfin_apps.llm.builder.kernels.cpu.matmul import MatmulGeometry
from shortfin_apps.llm.builder.kernels.epilogue import Epilogue
from shortfin_apps.llm.builder.weights.layout import LANES, Panels, QuantisedPanels
from shortfin_apps.llm.model.weight_blocks import Q4_1, Q8_0, BlockType
from tests.builder.random_blocks import BLOCK_TYPES

PAIRS = MatmulGeometry(
    n=3072, k_size=576, epilogue="store", dtype="bf16", blocks=None, pair=2, has_wide_vectors=True
)
NARROW = replace(PAIRS, dtype="f32", pair=1, has_wide_vectors=False)


@pytest.mark.parametrize(
    ("geometry", "width", "steps", "prefetch_steps", "tile_rows"),
    [(PAIRS, 32, 288, 32, 8), (NARROW, 16, 576, 32, 2), (replace(NARROW, dtype="f16"), 16, 576, 64, 2)],
)
def test_steps(geometry: MatmulGeometry, width: int, steps: int, prefetch_steps: int, tile_rows: int) -> None:
    assert (geometry.width, geometry.steps) == (width, steps)
    assert (geometry.prefetch_steps, geometry.grid.tile_rows) == (prefetch_steps, tile_rows)
    assert replace(geometry, blocks=Q8_0).block_steps * geometry.pair == 32


@pytest.mark.parametrize(
    ("n", "epilogue", "halves", "out_features"),
    [(64, "store", 4, 64), (48, "residual", 3, 48), (40, "store", 3, 48), (96, "silu", 6, 48)],
)
def test_results_are_padded_to_halves_of_panels(
    n: int, epilogue: Epilogue, halves: int, out_features: int
) -> None:
    geometry = replace(PAIRS, n=n, epilogue=epilogue)
    assert (geometry.halves, geometry.out_features) == (halves, out_features)
    assert geometry.grid.panels * 2 * LANES >= n
    out = geometry.interface.writes["out"]
    assert out.type == f"memref<?x{out_features}x{'bf16' if epilogue == 'silu' else 'f32'}>"


@pytest.mark.parametrize("blocks", [None, *BLOCK_TYPES], ids=str)
@pytest.mark.parametrize("pair", [1, 2])
def test_weights_are_read_as_they_are_stored(blocks: BlockType | None, pair: int) -> None:
    geometry = replace(PAIRS if pair == 2 else NARROW, blocks=blocks, k_size=512)
    layout = (
        QuantisedPanels(blocks, pair, False)
        if blocks
        else Panels("f32" if pair == 1 else "bf16", pair, False)
    )
    stored = layout.stored("w", (geometry.n, geometry.k_size))
    expected = [f"memref<{'x'.join(map(str, shape))}x{dtype}>" for shape, dtype in stored.values()]
    assert [geometry.interface.types[name] for name in ("w", "scales")[: len(stored)]] == expected


def test_residual_is_the_last_operand_read() -> None:
    interface = replace(PAIRS, blocks=Q4_1, epilogue="residual").interface
    assert list(interface.buffers) == ["x", "w", "scales", "residual", "out"]
