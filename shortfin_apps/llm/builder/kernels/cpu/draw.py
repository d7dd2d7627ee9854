"""Geometry of draw.mlir.j2, adjust.mlir.j2 and logprobs.mlir.j2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

from shortfin_apps.llm.builder.kernels.interface import Buffer, Interface, buffer
from shortfin_apps.llm.builder.weights.layout import LANES
from shortfin_apps.llm.contract import sampling_rule
from shortfin_apps.llm.contract.abi import (
    KEPT,
    NO_TOP_K,
    NOT_FINITE,
    NOT_SEEN,
    EditField,
    PenaltyField,
    SamplingField,
    TermField,
)

_OF_ROWS = buffer("i64", "rows")
_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class _RowGeometry:
    """Rows of `size` logits with `k` candidates each, as another entry has left them."""

    size: int
    k: int

    @property
    def lanes(self) -> int:
        return math.gcd(self.size, LANES)

    @property
    def rule(self) -> ModuleType:
        return sampling_rule

    @property
    def left(self) -> dict[str, Buffer]:
        """The candidates and logits of `left` rows."""
        return {
            "values": buffer("f32", "left", self.k),
            "indices": buffer("i64", "left", self.k),
            "logits": buffer("f32", "left", self.size),
        }


@dataclass(frozen=True, slots=True)
class DrawGeometry(_RowGeometry):
    """Draws from rows.

    `is_indexed`: the rows are picked by `row_indices`. `advances`: positions advance, as in a decode loop.
    `counts`: stored tokens are counted in a table.
    """

    is_indexed: bool
    advances: bool
    counts: bool

    @property
    def interface(self) -> Interface:
        positions = {"positions": _OF_ROWS}
        return Interface(
            constants=("rows", "left", "table"),
            reads={
                **self.left,
                **({"row_indices": _OF_ROWS} if self.is_indexed else {}),
                "sampling": buffer("i64", len(SamplingField), "rows"),
                "slots": _OF_ROWS,
                **({} if self.advances else positions),
            },
            writes={
                **(positions if self.advances else {}),
                "last_tokens": buffer("i64", "table"),
                **({"counts": buffer("i32", "table", self.size)} if self.counts else {}),
                "token_ids": _OF_ROWS,
            },
        )

    @property
    def fields(self) -> dict[str, int]:
        """The rows of `sampling` by lower-case name."""
        return {field.name.lower(): field.value for field in SamplingField}

    @property
    def no_top_k(self) -> int:
        return NO_TOP_K

    @property
    def not_finite(self) -> int:
        return NOT_FINITE

    @property
    def philox(self) -> dict[str, int]:
        """The constants of Philox by name, as i64."""
        words = {
            **dict(zip(("m0", "m1"), sampling_rule.PHILOX_MULTIPLIERS, strict=True)),
            **dict(zip(("w0", "w1"), sampling_rule.PHILOX_WEYL, strict=True)),
        }
        return {name: word - _WORD if word >= _WORD // 2 else word for name, word in words.items()}


@dataclass(frozen=True, slots=True)
class AdjustGeometry:
    """Adjusts rows of `size` logits."""

    size: int

    @property
    def interface(self) -> Interface:
        return Interface(
            constants=("rows", "left", "bitmasks", "num_edits", "table"),
            reads={
                "logits": buffer("f32", "left", self.size),
                "row_indices": _OF_ROWS,
                "penalties": buffer("f32", len(PenaltyField), "rows"),
                "edits": buffer("i32", len(EditField), "num_edits"),
                "allowed": buffer("i32", "bitmasks", -(-self.size // 32)),
                "allowed_indices": _OF_ROWS,
                "slots": _OF_ROWS,
                "resets": _OF_ROWS,
            },
            writes={
                "counts": buffer("i32", "table", self.size),
                "adjusted": buffer("f32", "rows", self.size),
            },
        )

    @property
    def edits(self) -> dict[str, int]:
        """The rows of `edits` by lower-case name."""
        return {field.name.lower(): field.value for field in EditField}

    @property
    def penalties(self) -> dict[str, int]:
        """The rows of `penalties` by lower-case name."""
        return {field.name.lower(): field.value for field in PenaltyField}

    @property
    def not_seen(self) -> int:
        return NOT_SEEN

    @property
    def kept(self) -> int:
        return KEPT


@dataclass(frozen=True, slots=True)
class LogprobGeometry(_RowGeometry):
    """Terms of the log-probabilities of rows."""

    @property
    def interface(self) -> Interface:
        return Interface(
            constants=("rows", "left", "table"),
            reads={
                **self.left,
                "row_indices": _OF_ROWS,
                "slots": _OF_ROWS,
                "last_tokens": buffer("i64", "table"),
            },
            writes={
                "terms": buffer("i64", len(TermField), "rows"),
                "top_values": buffer("f32", "rows", self.k),
                "top_indices": buffer("i64", "rows", self.k),
            },
        )

    @property
    def fields(self) -> dict[str, int]:
        """The rows of `terms` by lower-case name."""
        return {field.name.lower(): field.value for field in TermField}
