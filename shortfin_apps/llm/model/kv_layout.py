"""The data that a layer stores for the tokens of a sequence, and its pool of pages.

Each pool has one block table. Layers share a pool if a request needs the same pages for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shortfin_apps.llm.contract.config import KV_DTYPES, Pool, cache_row_elements

KVType = Literal["bf16", "f16", "f32", "q8_0"]  # q8_0: int8 with a scale per token and head
KV_DTYPE_NAMES: dict[KVType, str] = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "q8_0": "int8",
}


@dataclass(frozen=True, slots=True)
class KeysValues:
    """Keys and values per token. A token reads the last `window` tokens' ones; None: all tokens'.

    `values_in_keys`: a value is the first elements of its key, as in latent attention. It is only stored if
    kernels need it in another order than the key (`stores_values`).
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    values_in_keys: bool = False

    @property
    def pool(self) -> Pool:
        return "whole" if self.window is None else "window"

    def planes(self, stores_values: bool) -> int:
        """Return the cache rows per token: of its keys and of its values, or of both together."""
        return 1 if self.values_in_keys and not stores_values else 2

    def row_elements(self, kv: KVType) -> int:
        """Return the cache elements of one token's keys (its values have as many), including scales."""
        return cache_row_elements(self.kv_heads, self.head_dim, kv_dtype(kv))

    def page_elements(self, kv: KVType, stride: int, stores_values: bool) -> int:
        """Return the layer's cache elements in a page of `stride` tokens."""
        return self.planes(stores_values) * self.row_elements(kv) * stride


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state of `elements` f32 per page: the state after the page's last token.

    A token reads the state after the preceding token, so pages are kept as for a window of two tokens.
    """

    elements: int
    window: int = 2

    @property
    def pool(self) -> Pool:
        return "state"

    def page_elements(self, kv: KVType, stride: int, stores_values: bool) -> int:
        """Return the layer's elements in a page, counted in elements of the cache's dtype."""
        return 4 // kv_dtype(kv).itemsize * self.elements


KVLayout = KeysValues | State


def kv_dtype(kv: KVType) -> np.dtype[Any]:
    """Return the dtype of a cache element."""
    return KV_DTYPES[KV_DTYPE_NAMES[kv]]
