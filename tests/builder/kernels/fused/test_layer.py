"""The counters and the memory of the fused layer's stages."""

from __future__ import annotations

import pytest

from shortfin_apps.llm.builder.kernels.amx.matmul import MatmulFloatTilesGeometry
from shortfin_apps.llm.builder.kernels.avx512.attention import DecodeAttentionGeometry
from shortfin_apps.llm.builder.kernels.fused.layer import (
    FusedLayerGeometry,
    KernelGeometry,
    StageGeometry,
)
from shortfin_apps.llm.builder.kernels.fused.stages import RmsNormGeometry
from shortfin_apps.llm.builder.kernels.interface import Regions

NORM = RmsNormGeometry(576, 1e-5)
MATMUL = MatmulFloatTilesGeometry(n=960, k_size=576, epilogue="store", is_tiled=True)
ATTENTION = DecodeAttentionGeometry(
    q_heads=9, kv_heads=3, head_dim=64, stride=16, page_elements=0, tile_tokens=1, step_slots=64
)


def fused_layer(*kernels: KernelGeometry) -> FusedLayerGeometry:
    stages = tuple(StageGeometry(index, kernel, {}) for index, kernel in enumerate(kernels))
    return FusedLayerGeometry(stages, ("x",), ("qkv",), Regions({"normed": 1152}))


def test_counters_have_cache_lines_of_their_own() -> None:
    g = fused_layer(*[NORM] * 9)
    lines = {0} | {stage.completed_at + 64 * line for stage in g.stages for line in range(1 + g.partitions)}
    assert len(lines) == 1 + 9 * (1 + g.partitions)
    assert max(lines) < g.call_bytes
    assert all(line % 64 == 0 for line in lines)


def test_a_call_has_counters_for_nine_stages() -> None:
    with pytest.raises(AssertionError):
        fused_layer(*[NORM] * 10)


def test_a_waiting_worker_prefetches_eight_panels() -> None:
    stage = StageGeometry(0, MATMUL, {})
    assert stage.prefetch_turns * stage.prefetch_lines * 64 == 8 * MATMUL.panel_bytes


def test_stages_use_the_memory_of_a_worker_in_turn() -> None:
    assert fused_layer(NORM).local_bytes == 64
    assert fused_layer(NORM, MATMUL).local_bytes == MATMUL.local.bytes
    assert fused_layer(ATTENTION, NORM).local_bytes == ATTENTION.token_local.bytes


def test_only_a_layer_with_attention_writes_the_cache() -> None:
    assert fused_layer(NORM, MATMUL).writes == ("counters", "qkv", "scratch")
    assert fused_layer(ATTENTION, MATMUL).writes == ("counters", "cache", "qkv", "scratch")
