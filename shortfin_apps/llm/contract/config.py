"""The artefact's `config.json`: the sizes that a VMFB was compiled for.

The fields and their meaning are upstream shortfin's (`module_abi_version` 1). Upstream refuses unknown
top-level keys, so this file holds only known ones; everything else about a model is in `manifest.json`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from shortfin_apps.llm.contract.errors import ArtifactError

KV_DTYPES: dict[str, np.dtype[Any]] = {
    "int8": np.dtype(np.int8),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
}
SCALE_BYTES = 4  # f32; an int8 cache has one scale per head of a row
_QUANTISED_ROW_BYTES = 16  # an int8 row is padded to a multiple of this, so that GPU loads are aligned
LOGITS_NORMALIZATIONS = ("none", "softmax", "log_softmax")
# Pools of pages, in the order of a program's arguments: "whole" keeps K and V of all tokens, "window" those
# of the last tokens, and "state" one recurrent state per page.
Pool = Literal["whole", "window", "state"]
POOLS: tuple[Pool, ...] = ("whole", "window", "state")


def cache_row_elements(kv_heads: int, head_dim: int, dtype: np.dtype[Any]) -> int:
    """Return how many slab elements one cache row (K or V of one token in one layer) takes.

    An int8 row includes the heads' scales and padding.
    """
    if dtype != np.int8:
        return kv_heads * head_dim
    needed = kv_heads * (head_dim + SCALE_BYTES)
    return -(-needed // _QUANTISED_ROW_BYTES) * _QUANTISED_ROW_BYTES


@dataclass(frozen=True, slots=True)
class Slab:
    """The memory of a pool's pages on the device of one pipeline stage, `[pages, elements]`."""

    pool: Pool
    stage: int
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKVCacheConfig:
    """Geometry of the page table.

    A page holds `block_seq_stride` tokens of every transformer block. Each pipeline stage owns one slab
    `[device_block_count, elements]` of `kv_cache_dtype`; `paged_kv_block_size_elements_per_device` is the
    number of elements of a page in each slab. `device_block_count` may be changed at deployment.

    If a model has a pool other than "whole", `pools` maps the pool of each slab, in order, to the number of
    transformer blocks in the pool. Such models have one stage. A pool other than "whole" has its own number
    of pages, and keeps the pages that the last `window_tokens` tokens need. A page of pool "state" holds the
    state after the page's last token; `window_tokens` is then 2. `pool_heads` maps each pool to its number of
    K/V heads and their size, if the pools differ in these. With `values_in_keys`, a value is a part of its
    key, and takes no memory. Upstream has none of these four, which config.json has only if needed.
    """

    attention_head_count_kv: int
    block_seq_stride: int
    device_block_count: int
    kv_cache_dtype: str
    paged_kv_block_size_elements_per_device: tuple[int, ...] | None = None
    window_tokens: int | None = None
    pools: Mapping[Pool, int] | None = None
    pool_heads: Mapping[Pool, tuple[int, int]] | None = None
    values_in_keys: bool | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return KV_DTYPES[self.kv_cache_dtype]

    @property
    def planes(self) -> int:
        """Cache rows of a token in a layer: K and V, or a single one."""
        return 1 if self.values_in_keys else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of a compiled model, as in upstream shortfin's `config.json`."""

    max_seq_len: int
    transformer_block_count: int
    attn_head_dim: int
    prefill_batch_sizes: tuple[int, ...]
    decode_batch_sizes: tuple[int, ...]
    paged_kv_cache: PagedKVCacheConfig
    has_prefill_position: bool = False
    module_name: str = "module"
    module_abi_version: int = 1
    logits_normalization: str = "none"
    attn_dtype: str = "float16"
    top_k: int | None = None

    @property
    def stride(self) -> int:
        """Tokens per page."""
        return self.paged_kv_cache.block_seq_stride

    @property
    def window_tokens(self) -> int | None:
        """How many of the last tokens pools other than "whole" keep; None if there is no such pool."""
        return self.paged_kv_cache.window_tokens

    @property
    def has_window_table(self) -> bool:
        """Whether window pages have a block table in addition to the block table of other pages."""
        return len(self.pools) > 1

    @property
    def pools(self) -> Mapping[Pool, int]:
        """The number of transformer blocks that store their tokens in each pool."""
        return self.paged_kv_cache.pools or {"whole": self.transformer_block_count}

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """The slabs of the page table, in the order of a program's arguments."""
        pools, sizes = self.paged_kv_cache.pools, self.page_elements
        if pools is None:
            return tuple(Slab("whole", stage, elements) for stage, elements in enumerate(sizes))
        return tuple(Slab(pool, 0, elements) for pool, elements in zip(pools, sizes, strict=True))

    @property
    def page_elements(self) -> tuple[int, ...]:
        """Elements of one page in each slab."""
        cache = self.paged_kv_cache
        if cache.paged_kv_block_size_elements_per_device is not None:
            return cache.paged_kv_block_size_elements_per_device
        return (self.token_elements * cache.block_seq_stride,)

    @property
    def token_elements(self) -> int:
        """Elements of K and V of one token, summed over all slabs; states are not counted."""
        dtype, planes = self.paged_kv_cache.dtype, self.paged_kv_cache.planes
        rows = {pool: cache_row_elements(*self.heads_of(pool), dtype) for pool in self.pools}
        return sum(blocks * planes * rows[pool] for pool, blocks in self.pools.items() if pool != "state")

    def heads_of(self, pool: Pool) -> tuple[int, int]:
        """Return the number of K/V heads in the pool's layers, and their size."""
        cache = self.paged_kv_cache
        return (cache.pool_heads or {}).get(pool, (cache.attention_head_count_kv, self.attn_head_dim))

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """Read a `config.json`. Raises ArtifactError, which names the file and the invalid field."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ArtifactError(f"{path}: no such file; `shortfin-llm build` makes one") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ArtifactError(f"{path}: not readable as JSON ({error})") from error
        try:
            return cls.from_dict(raw)
        except ArtifactError as error:
            raise ArtifactError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, raw: object) -> ModelConfig:
        """Make a config from parsed JSON. Raises ArtifactError; as in upstream, also for unknown keys."""
        if not isinstance(raw, dict):
            raise ArtifactError("the model config must be a JSON object")
        fields = {k: v for k, v in raw.items() if v is not None}
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(fields.keys() - known):
            raise ArtifactError(f"unknown model config field {unknown[0]!r}")
        cache = fields.pop("paged_kv_cache", None)
        if not isinstance(cache, dict):
            raise ArtifactError("`paged_kv_cache` is missing; the server only runs paged models")
        cache_known = {f.name for f in dataclasses.fields(PagedKVCacheConfig)}
        cache = {k: v for k, v in cache.items() if k in cache_known and v is not None}
        _require_fields(PagedKVCacheConfig, cache, "paged_kv_cache.")
        paged = PagedKVCacheConfig(**{k: _tuples(v) for k, v in cache.items()})
        _require_fields(cls, {**fields, "paged_kv_cache": paged})
        config = cls(paged_kv_cache=paged, **{k: _tuples(v) for k, v in fields.items()})
        config._check()
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object, which upstream can load, too."""
        fields = dataclasses.asdict(self)
        for name in ("window_tokens", "pools", "pool_heads", "values_in_keys"):
            if fields["paged_kv_cache"][name] is None:
                del fields["paged_kv_cache"][name]
        return fields

    def _check(self) -> None:
        cache = self.paged_kv_cache
        for name in ("max_seq_len", "transformer_block_count", "attn_head_dim"):
            _require_positive(name, getattr(self, name))
        for name in ("attention_head_count_kv", "block_seq_stride", "device_block_count"):
            _require_positive(f"paged_kv_cache.{name}", getattr(cache, name))
        for name in ("prefill_batch_sizes", "decode_batch_sizes"):
            sizes = getattr(self, name)
            if not isinstance(sizes, tuple) or not sizes:
                raise ArtifactError(f"`{name}` must list at least one batch size")
            for size in sizes:
                _require_positive(name, size)
        if not isinstance(self.page_elements, tuple) or not self.page_elements:
            raise ArtifactError("`paged_kv_block_size_elements_per_device` must list each slab's page size")
        for elements in self.page_elements:
            _require_positive("paged_kv_block_size_elements_per_device", elements)
        if self.top_k is not None:
            _require_positive("top_k", self.top_k)
        if cache.window_tokens is not None:
            _require_positive("paged_kv_cache.window_tokens", cache.window_tokens)
        self._check_pools()
        if cache.values_in_keys not in (None, True, False):
            raise ArtifactError("`paged_kv_cache.values_in_keys` must be true or false")
        if not isinstance(self.has_prefill_position, bool):
            raise ArtifactError(
                f"`has_prefill_position` must be true or false, not {self.has_prefill_position!r}"
            )
        if not isinstance(self.module_name, str):
            raise ArtifactError(f"`module_name` must be a string, not {self.module_name!r}")
        if self.module_abi_version != 1:
            raise ArtifactError(f"`module_abi_version` {self.module_abi_version} is not supported")
        if cache.kv_cache_dtype not in tuple(KV_DTYPES):  # a tuple, because the value may not be hashable
            names = ", ".join(KV_DTYPES)
            raise ArtifactError(f"`kv_cache_dtype` {cache.kv_cache_dtype!r} is none of {names}")
        if self.logits_normalization not in LOGITS_NORMALIZATIONS:
            names = ", ".join(LOGITS_NORMALIZATIONS)
            raise ArtifactError(f"`logits_normalization` {self.logits_normalization!r} is none of {names}")

    def _check_pools(self) -> None:
        pools = self.paged_kv_cache.pools
        if pools is not None:
            if not isinstance(pools, dict) or list(pools) != [pool for pool in POOLS if pool in pools]:
                raise ArtifactError(f"`paged_kv_cache.pools` must name some of {', '.join(POOLS)}, in order")
            for pool, blocks in pools.items():
                _require_positive(f"paged_kv_cache.pools.{pool}", blocks)
            if sum(pools.values()) != self.transformer_block_count:
                raise ArtifactError("`paged_kv_cache.pools` must count each transformer block once")
            if len(pools) != len(self.page_elements) or (len(pools) > 1 and "whole" not in pools):
                raise ArtifactError("`paged_kv_cache.pools` needs a slab for each pool, one of them whole")
        self._check_pool_heads()
        if (self.window_tokens is None) == any(pool != "whole" for pool in pools or ()):
            raise ArtifactError(
                "`paged_kv_cache.window_tokens` goes with a pool other than whole in `paged_kv_cache.pools`"
            )

    def _check_pool_heads(self) -> None:
        heads = self.paged_kv_cache.pool_heads
        if heads is None:
            return
        if not isinstance(heads, dict) or not heads.keys() <= self.pools.keys():
            raise ArtifactError("`paged_kv_cache.pool_heads` must name some of the pools")
        for pool, sizes in heads.items():
            if not isinstance(sizes, tuple) or len(sizes) != 2:
                raise ArtifactError(f"`paged_kv_cache.pool_heads.{pool}` must be K/V heads and their size")
            for size in sizes:
                _require_positive(f"paged_kv_cache.pool_heads.{pool}", size)


def _tuples(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _require_fields(cls: type[Any], given: Mapping[str, object], prefix: str = "") -> None:
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING and field.name not in given:
            raise ArtifactError(f"`{prefix}{field.name}` is missing")


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArtifactError(f"`{name}` must be a positive integer, not {value!r}")
