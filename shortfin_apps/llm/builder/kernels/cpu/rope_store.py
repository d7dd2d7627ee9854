"""Geometry of rope_store.mlir.j2."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.cpu.kv_pages import KvPages
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeStoreGeometry(KvPages):
    """Rotary embedding of q and k; k and v are written to their pages, the rotated q remains f32."""

    @property
    def half(self) -> int:
        """Elements in each half of a head; rotation pairs the two halves."""
        return self.head_dim // 2

    @property
    def k_column(self) -> int:
        return self.q_features

    @property
    def v_column(self) -> int:
        return (self.q_heads + self.kv_heads) * self.head_dim

    @property
    def interface(self) -> Interface:
        qkv_features = self.v_column + self.kv_heads * self.head_dim
        return Interface(
            constants=self.constants,
            reads={
                "qkv": buffer("f32", "tokens", qkv_features),
                "rotary": buffer("f32", "tokens", 2, self.half),
                "token_rows": buffer("i64", "tokens"),
                "positions": buffer("i64", "tokens"),
                **self.batch,
            },
            writes={"cache": self.cache, "q": buffer("f32", "tokens", self.q_features)},
        )
