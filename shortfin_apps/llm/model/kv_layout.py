"""What a layer stores for the tokens of a sequence, and in which pool of pages.

A pool's pages have one block table. Layers share a pool if a request needs the same pages for all of them.
Another attention has its own layout here: latent attention (MLA) would store one compressed row per token,
with `page_elements` of `stride * (rank + rotated elements)`, in the pool "whole".
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
    """A row of keys and a row of values per token; a token reads the last `window` ones, or all of them."""

    kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def pool(self) -> Pool:
        return "whole" if self.window is None else "window"

    def row_elements(self, kv: KVType) -> int:
        """Return the elements of a token's keys, or of its values."""
        return cache_row_elements(self.kv_heads, self.head_dim, kv_dtype(kv))

    def page_elements(self, kv: KVType, stride: int) -> int:
        """Return the elements of the layer in a page of `stride` tokens."""
        return 2 * self.row_elements(kv) * stride


@dataclass(frozen=True, slots=True)
class State:
    """A state of `elements` f32 as of the last token of a page.

    A token reads the state after the token before it, as if the window were two tokens.
    """

    elements: int
    window: int = 2

    @property
    def pool(self) -> Pool:
        return "state"

    def page_elements(self, kv: KVType, stride: int) -> int:
        """Return the elements of the layer in a page, counted in elements of the cache's type."""
        return 4 // kv_dtype(kv).itemsize * self.elements


KVLayout = KeysValues | State


def kv_dtype(kv: KVType) -> np.dtype[Any]:
    """Return the type of an element of the cache."""
    return KV_DTYPES[KV_DTYPE_NAMES[kv]]
