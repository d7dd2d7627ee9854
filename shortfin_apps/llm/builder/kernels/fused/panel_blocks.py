"""Sizes of weights in quantised blocks in panels (QuantisedPanels in weights/layout.py)."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.weights.layout import PANEL, group_bytes
from shortfin_apps.llm.model.weight_blocks import BLOCK, BlockType


@dataclass(frozen=True, slots=True)
class PanelBlocks:
    """Panels of 32 columns of `k_size` weights of type `blocks`, of which kernels read 32 along K at a time.

    A part is the overlap of a weight block and these 32: all of them, or half of them.
    """

    k_size: int
    blocks: BlockType

    @property
    def bits(self) -> int:
        return self.blocks.bits

    @property
    def has_minima(self) -> bool:
        return self.blocks.has_minima

    @property
    def group(self) -> int | None:
        return self.blocks.group

    @property
    def num_terms(self) -> int:
        return self.blocks.num_terms

    @property
    def parts(self) -> int:
        """Parts per 32 weights along K."""
        return BLOCK // self.blocks.size

    @property
    def block_bytes(self) -> int:
        """Bytes of the quants of a panel for 32 weights along K."""
        return PANEL * BLOCK * self.bits // 8

    @property
    def panel_bytes(self) -> int:
        return PANEL * self.k_size * self.bits // 8

    @property
    def own_terms_bytes(self) -> int:
        """Bytes of one part's own scales and minima in a panel: f16, or with groups i8."""
        return PANEL * self.num_terms * (1 if self.group else 2)

    @property
    def group_parts(self) -> int:
        """Parts per group, which share the f16 of their scales and of their minima."""
        assert self.group is not None
        return self.group // self.blocks.size

    @property
    def group_bytes(self) -> int:
        """Bytes of one group's scales and minima in a panel: the shared f16, then the i8 of each part."""
        return group_bytes(self.blocks)

    @property
    def group_head_bytes(self) -> int:
        """Bytes of the shared f16 of one group in a panel."""
        return self.group_bytes - self.group_parts * self.own_terms_bytes

    @property
    def panel_terms_bytes(self) -> int:
        if self.group is None:
            return self.k_size // BLOCK * self.terms_bytes
        return self.k_size // self.group * self.group_bytes

    @property
    def terms_bytes(self) -> int:
        """Bytes of a panel's scales and minima per 32 weights along K; with groups, the mean rounded down."""
        if self.group is None:
            return self.parts * self.own_terms_bytes
        return BLOCK * self.group_bytes // self.group
