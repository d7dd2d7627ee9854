from __future__ import annotations

from shortfin_apps.llm.builder.kernels.cpu.rope_store import RopeStoreGeometry


def test_q_k_and_v_stand_one_after_another() -> None:
    geometry = RopeStoreGeometry(
        q_heads=9, kv_heads=3, head_dim=64, stride=16, page_elements=12288, kv_dtype="f16"
    )
    assert (geometry.half, geometry.k_column, geometry.v_column) == (32, 576, 768)
    assert geometry.interface.types["qkv"] == "memref<?x960xf32>"
    assert geometry.interface.types["cache"] == "memref<?x12288xf16>"
