"""Extracts each layer's keys and values from a page. The order of the extracted elements is unspecified."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.contract.config import SCALE_BYTES, ModelConfig, Pool, cache_row_elements

Array = npt.NDArray[Any]
Planes = dict[int, tuple[Array, Array]]  # K and V by layer, dequantised to f32 or in the stored type


def read_planes(
    page: Mapping[Pool, Array], config: ModelConfig, pools: Mapping[Pool, Sequence[int]]
) -> list[Planes]:
    """Return each layer's K and V in a page, for each possible layout of the page.

    `page` has the page's elements [elements] in each pool; `pools` lists the layers of each pool. An int8
    cache stores scales after each token's row or after each head's elements, depending on the program's
    attention; then the result has two readings, one of which is right. Layers in the pool "state" are left
    out, because they have no keys. If a value is a part of its key, the key counts as both.
    """
    kept = [pool for pool in pools if pool != "state"]
    if config.paged_kv_cache.dtype != np.int8:
        planes = config.paged_kv_cache.planes
        return [_joined([_layers(page[pool], pools[pool], lambda x: _floats(x, planes)) for pool in kept])]
    readings = [_int8_readings(page[pool], config, pool, pools[pool]) for pool in kept]
    return [_joined(each) for each in zip(*readings, strict=True)]


def _int8_readings(
    elements: Array, config: ModelConfig, pool: Pool, layers: Sequence[int]
) -> tuple[Planes, Planes]:
    """Return each layer's K and V for both layouts of the scales."""
    (heads, dim), stride, planes = config.heads_of(pool), config.stride, config.paged_kv_cache.planes

    def by_token(layer: Array) -> tuple[Array, Array]:
        rows = layer.reshape(planes, stride, -1)
        used = heads * (dim + SCALE_BYTES)
        quants = rows[..., : heads * dim].reshape(planes, stride, heads, dim).astype(np.float32)
        scales = np.ascontiguousarray(rows[..., heads * dim : used]).view(np.float32)
        both = quants * scales[..., None]
        return both[0], both[-1]

    def by_head(layer: Array) -> tuple[Array, Array]:
        of_heads = layer[: planes * heads * stride * (dim + SCALE_BYTES)].reshape(planes, heads, -1)
        quants = of_heads[..., : stride * dim].astype(np.float32)
        scales = np.ascontiguousarray(of_heads[..., stride * dim :]).view(np.float32)
        k = quants[0].reshape(heads, dim, stride) * scales[0][:, None, :]
        v = quants[-1].reshape(heads, stride, dim) * scales[-1][:, :, None]
        return k, v

    # The wrong reading interprets quants as scales, which may then overflow.
    row = cache_row_elements(heads, dim, config.paged_kv_cache.dtype)
    with np.errstate(all="ignore"):
        return (
            _layers(elements, layers, by_token, planes * stride * row),
            _layers(elements, layers, by_head, planes * heads * stride * (dim + SCALE_BYTES)),
        )


def _floats(layer: Array, planes: int) -> tuple[Array, Array]:
    both = layer.reshape(planes, -1)
    return both[0], both[-1]


def _layers(
    elements: Array,
    layers: Sequence[int],
    read: Callable[[Array], tuple[Array, Array]],
    layer_elements: int | None = None,
) -> Planes:
    size = layer_elements or len(elements) // len(layers)
    return {layer: read(elements[i * size : (i + 1) * size]) for i, layer in enumerate(layers)}


def _joined(planes: Sequence[Planes]) -> Planes:
    return {layer: each for of_pool in planes for layer, each in of_pool.items()}
