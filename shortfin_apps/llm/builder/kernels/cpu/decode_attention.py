"""Geometry of decode_attention_function.mlir.j2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shortfin_apps.llm.builder.kernels.cpu.paged_attention import PagedAttentionGeometry
from shortfin_apps.llm.builder.kernels.cpu.rope_store import RopeStoreGeometry
from shortfin_apps.llm.builder.kernels.interface import Buffer, buffer


@dataclass(frozen=True, slots=True)
class VectorDecodeGeometry:
    """Rotary embedding, cache write and attention of one token per sequence, on the vectors of any CPU."""

    rope: RopeStoreGeometry
    attention: PagedAttentionGeometry
    # Bindings of the dispatch by parameter of the function. `out` is bound to the result's buffer.
    bindings: ClassVar[Mapping[str, str]] = {
        "qkv": "all_qkv",
        "rotary": "all_rotary",
        "starts": "starts",
        "seq_lens": "seq_lens",
        "blocks": "blocks",
        "sinks": "sinks",
        "cache": "cache",
        "q": "queries",
    }
    sizes: ClassVar[tuple[str, ...]] = ("width", "pages", "layer", "row", "head")

    @property
    def window(self) -> int | None:
        return self.attention.window

    @property
    def kv_heads(self) -> int:
        return self.attention.kv_heads

    @property
    def has_sinks(self) -> bool:
        return self.attention.has_sinks

    @property
    def buffers(self) -> dict[str, Buffer]:
        """The function's buffers, with one row per token."""
        qkv_features = self.rope.v_column + self.kv_heads * self.rope.head_dim
        features = self.attention.q_features
        return {
            "qkv": buffer("f32", "rows", qkv_features),
            "rotary": buffer("f32", "rows", 2, self.rope.half),
            "starts": buffer("i64", "rows"),
            **self.attention.batch,
            **({"sinks": buffer("f32", self.attention.q_heads)} if self.has_sinks else {}),
            "cache": self.attention.cache,
            "q": buffer("f32", "rows", features),
            "out": buffer(self.attention.dtype, "rows", features),
        }

    @property
    def parameters(self) -> dict[str, str]:
        """The MLIR types of the function's parameters, by name."""
        types = {name: each.type for name, each in self.buffers.items()}
        return types | dict.fromkeys(self.sizes, "index")

    def extra_results(self, out: str) -> dict[str, tuple[int, str]]:
        """Return the dispatch's results besides the stages' buffers, by name: (features, dtype).

        The rotated q and the value `out` are results of the dispatch, as the function takes memrefs.
        """
        features = self.attention.q_features
        return {"queries": (features, "f32"), out: (features, self.attention.dtype)}
