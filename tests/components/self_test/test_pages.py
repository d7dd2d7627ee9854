from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.components.self_test.pages import read_planes
from shortfin_apps.llm.contract.config import ModelConfig, Pool
from tests.builder.cached_rows import rows_in_bytes
from tests.components.fake_device import fake_config

Array = npt.NDArray[Any]

STRIDE, HEADS, DIM = 4, 3, 8
POOLS: dict[Pool, tuple[int, ...]] = {"whole": (0, 2), "window": (1,)}
RNG = np.random.default_rng(3)
KV = RNG.standard_normal((3, 2, STRIDE, HEADS, DIM)).astype(np.float32)  # of layers, K and V, tokens


def config(dtype: str) -> ModelConfig:
    plain = fake_config(stride=STRIDE, window=5)
    cache = replace(plain.paged_kv_cache, attention_head_count_kv=HEADS, kv_cache_dtype=dtype)
    return replace(plain, transformer_block_count=3, attn_head_dim=DIM, paged_kv_cache=cache)


def test_each_layer_is_read_from_its_slab() -> None:
    page = {pool: KV[list(layers)].reshape(-1) for pool, layers in POOLS.items()}
    [planes] = read_planes(page, config("float32"), POOLS)
    assert sorted(planes) == [0, 1, 2]
    for layer, (k, v) in planes.items():
        np.testing.assert_array_equal(k.reshape(KV[layer, 0].shape), KV[layer, 0])
        np.testing.assert_array_equal(v.reshape(KV[layer, 1].shape), KV[layer, 1])


def test_a_slab_of_states_is_not_read() -> None:
    page: dict[Pool, Array] = {"whole": KV[[0, 2]].reshape(-1), "state": np.zeros(7, np.float32)}
    [planes] = read_planes(page, config("float32"), {"whole": (0, 2), "state": (1,)})
    assert sorted(planes) == [0, 2]


@pytest.mark.parametrize("by_head", [False, True])
def test_one_of_the_readings_of_bytes_is_right(by_head: bool) -> None:
    """With scales behind each token's row, and behind each head's elements."""
    scales = np.abs(KV).max(axis=-1) / np.float32(127)
    quants = np.rint(KV / scales[..., None]).astype(np.int8)
    row_bytes = -(-HEADS * (DIM + 4) // 16) * 16
    if by_head:  # then what is behind the last layer is not used
        page = {
            pool: np.zeros(len(layers) * 2 * STRIDE * row_bytes, np.int8) for pool, layers in POOLS.items()
        }
        for pool, layers in POOLS.items():
            used = _by_head(quants[list(layers)], scales[list(layers)])
            page[pool][: len(used)] = used
    else:
        page = {
            pool: rows_in_bytes(quants[list(n)], scales[list(n)], row_bytes).reshape(-1)
            for pool, n in POOLS.items()
        }
    right = read_planes(page, config("int8"), POOLS)[by_head]
    for layer, (k, v) in right.items():
        expected = quants[layer] * scales[layer][..., None]
        assert sorted(k.reshape(-1)) == sorted(expected[0].reshape(-1))
        assert sorted(v.reshape(-1)) == sorted(expected[1].reshape(-1))


def test_each_pool_may_have_other_heads() -> None:
    """A layer with a window has HEADS of DIM, the one without has half as many elements."""
    heads: dict[Pool, tuple[int, int]] = {"whole": (1, DIM), "window": (HEADS, DIM)}
    mixed = config("int8")
    mixed = replace(mixed, paged_kv_cache=replace(mixed.paged_kv_cache, pool_heads=heads))
    kept: dict[Pool, Array] = {"whole": KV[:1, :, :, :1], "window": KV[1:2]}
    page = {}
    for pool, values in kept.items():
        scales = np.abs(values).max(axis=-1) / np.float32(127)
        quants = np.rint(values / scales[..., None]).astype(np.int8)
        row_bytes = -(-heads[pool][0] * (DIM + 4) // 16) * 16
        page[pool] = rows_in_bytes(quants, scales, row_bytes).reshape(-1)
    planes, _ = read_planes(page, mixed, {"whole": (0,), "window": (1,)})
    for layer, values in enumerate(kept.values()):
        np.testing.assert_allclose(planes[layer][0], values[0, 0], atol=0.02)
        np.testing.assert_allclose(planes[layer][1], values[0, 1], atol=0.02)


def _by_head(quants: Array, scales: Array) -> Array:
    """K [heads, head_dim, stride] and V [heads, stride, head_dim], each head with its scales."""
    k = np.moveaxis(quants[:, 0], 1, -1).reshape(len(quants), HEADS, -1)
    v = np.moveaxis(quants[:, 1], 1, 2).reshape(len(quants), HEADS, -1)
    parts = []
    for plane, values in ((0, k), (1, v)):
        own = np.ascontiguousarray(np.moveaxis(scales[:, plane], 1, -1)).view(np.int8)
        parts.append(np.concatenate([values, own.reshape(len(quants), HEADS, -1)], axis=-1))
    layers: Array = np.stack(parts, axis=1).reshape(-1)
    return layers
