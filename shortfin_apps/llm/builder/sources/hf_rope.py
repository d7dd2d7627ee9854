"""Read the rotary scaling of a Hugging Face `config.json`: `rope_scaling`, in newer files `rope_parameters`.

gguf_rope.py renames the keys of GGUF files to the same fields.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat

from shortfin_apps.llm.builder.sources.base import unsupported
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.attention import QueryScaling
from shortfin_apps.llm.model.families.family import Size
from shortfin_apps.llm.model.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    YarnScaling,
    longrope_attention_factor,
    yarn_attention_factor,
)

Turns = Annotated[float, Field(ge=1e-3, le=1e6)]  # published models have 1 to 32


class HfRope(BaseModel):
    """The fields of `rope_scaling`, for all kinds of scaling."""

    model_config = ConfigDict(allow_inf_nan=False, extra="ignore")

    rope_type: str | None = None
    type: str | None = None
    rope_theta: PositiveFloat | None = None
    factor: PositiveFloat | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: Size | None = None
    attention_factor: PositiveFloat | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: Turns | None = None
    beta_slow: Turns | None = None
    truncate: bool = True
    short_factor: list[PositiveFloat] | None = None
    long_factor: list[PositiveFloat] | None = None
    partial_rotary_factor: PositiveFloat | None = None
    llama_4_scaling_beta: NonNegativeFloat | None = None
    full_attention: HfRope | None = None  # scalings per kind of layer; if set, no other fields are
    sliding_attention: HfRope | None = None

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"

    def scaling(self, where: str, context: int, rotated: int) -> RopeScaling | None:
        """Return the scaling; None for an unscaled RoPE. Raises BuildError if it is not supported.

        `where` names the file; `context`: `max_position_embeddings`; `rotated`: the number of elements of a
        head that rotate.
        """
        match self.kind:
            case "default":
                return None
            case "linear":
                return self._linear(where)
            case "llama3":
                return self._llama3(where)
            case "yarn":
                return self._yarn(where, context)
            case "proportional" if self.factor in (None, 1):
                return ProportionalScaling(kept=int((self.partial_rotary_factor or 1.0) * rotated // 2))
            case "longrope" | "su":
                return self._longrope(where, context, rotated)
            case kind:
                raise unsupported(where, f"rotary scaling `{kind}`")

    def _linear(self, where: str) -> LinearScaling:
        if self.factor is None:
            raise _incomplete(where, "linear")
        return LinearScaling(factor=self.factor)

    def _llama3(self, where: str) -> Llama3Scaling:
        factor, low, high = self.factor, self.low_freq_factor, self.high_freq_factor
        original = self.original_max_position_embeddings
        if factor is None or low is None or high is None or original is None or low >= high:
            raise _incomplete(where, "llama3")
        return Llama3Scaling(
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=original,
        )

    def _yarn(self, where: str, context: int) -> YarnScaling:
        original = self.original_max_position_embeddings or context
        factor = self.factor or context / original
        fast, slow = self.beta_fast or 32.0, self.beta_slow or 1.0
        if fast <= slow:
            raise _incomplete(where, "yarn")
        return YarnScaling(
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=self.attention_factor or self._yarn_attention_factor(factor),
            beta_fast=fast,
            beta_slow=slow,
            truncate=self.truncate,
        )

    def _longrope(self, where: str, context: int, rotated: int) -> LongRopeScaling:
        short, long = self.short_factor or (), self.long_factor or ()
        if not 2 * len(short) == 2 * len(long) == rotated:
            raise _incomplete(where, "longrope")
        original = self.original_max_position_embeddings or context
        factor = self.factor or context / original
        return LongRopeScaling(
            short_factors=tuple(short),
            long_factors=tuple(long),
            original_max_position_embeddings=original,
            attention_factor=self.attention_factor or longrope_attention_factor(factor, original),
        )

    def _yarn_attention_factor(self, factor: float) -> float:
        """Compute the default attention factor like transformers.

        DeepSeek's `mscale` and `mscale_all_dim` are only used if both are given and not 0.
        """
        if not self.mscale or not self.mscale_all_dim:
            return yarn_attention_factor(factor)
        return yarn_attention_factor(factor, self.mscale) / yarn_attention_factor(factor, self.mscale_all_dim)


def query_scaling(where: str, rope: Rope, beta: float | None) -> QueryScaling | None:
    """Return the scaling of queries, in periods of YaRN's original context; None for a `beta` of 0.

    Raises BuildError for a `rope` without YaRN. `where` names the file.
    """
    if not beta:
        return None
    if not isinstance(rope.scaling, YarnScaling):
        raise unsupported(where, "a scaling of queries (`llama_4_scaling_beta`) without YaRN")
    return QueryScaling(beta=beta, period=rope.scaling.original_max_position_embeddings)


def _incomplete(where: str, kind: str) -> BuildError:
    return BuildError(f"{where}: rotary scaling `{kind}` is incomplete")
