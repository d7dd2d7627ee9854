"""The vector kernels' layout of KV pages; rope_store writes them and paged_attention reads them."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.interface import Buffer, buffer
from shortfin_apps.llm.contract.config import SCALE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPages:
    """KV pages of `stride` tokens, in which several query heads share a K/V head.

    For each layer, a page has K [kv_heads, head_dim, stride], then V [kv_heads, stride, head_dim], in
    `kv_dtype`. In i8, the elements of each head of K, and of V, are followed by their scales [stride] f32,
    one per token, and the page may end with padding. A scale is the largest magnitude / 127, and NaN if any
    element is NaN.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    stride: int
    page_elements: int
    kv_dtype: str

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        return self.q_heads // self.kv_heads

    @property
    def q_features(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def is_quantised(self) -> bool:
        return self.kv_dtype == "i8"

    @property
    def head_values(self) -> int:
        """Elements of K, or V, of a head in a page, without scales."""
        return self.stride * self.head_dim

    @property
    def head_elements(self) -> int:
        return self.head_values + (SCALE_BYTES * self.stride if self.is_quantised else 0)

    @property
    def plane_elements(self) -> int:
        """Elements of K, or V, of all heads of a layer in a page."""
        return self.kv_heads * self.head_elements

    @property
    def layer_elements(self) -> int:
        return 2 * self.plane_elements

    @property
    def cache(self) -> Buffer:
        return buffer(self.kv_dtype, "pages", self.page_elements)

    @property
    def constants(self) -> tuple[str, ...]:
        """The dispatch's constants; `block`: tokens per workgroup; `width`: columns of the block table."""
        return ("tokens", "rows", "block", "width", "pages", "layer")

    @property
    def batch(self) -> dict[str, Buffer]:
        """The buffers with a value per sequence that rope_store and paged_attention read."""
        return {"seq_lens": buffer("i64", "rows"), "blocks": buffer("i64", "rows", "width")}
