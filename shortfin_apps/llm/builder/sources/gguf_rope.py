"""Rotary scaling in a GGUF file: from `rope.scaling.*` keys, or from a tensor for Llama 3."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt

from shortfin_apps.llm.builder.sources.base import Array, unsupported
from shortfin_apps.llm.model.families.config import Config
from shortfin_apps.llm.model.families.family import Family
from shortfin_apps.llm.model.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)

# [rotated / 2]: divisors of the rotary frequencies, by Llama 3's rule or LongRoPE's two sets
ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)

# GGUF stores Llama 3's factors but not the rule that made them; every published Llama 3 uses these.
LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_CONTEXT = 8192


class GgufRope(BaseModel):
    """The keys below the architecture's name that define the rotary scaling."""

    model_config = ConfigDict(allow_inf_nan=False, extra="ignore")

    context_length: PositiveInt
    dimensions: PositiveInt | None = Field(None, alias="rope.dimension_count")
    is_finetuned: bool = Field(True, alias="rope.scaling.finetuned")
    kind: str = Field("linear", alias="rope.scaling.type")  # llama.cpp's default
    factor: NonNegativeFloat = Field(0.0, alias="rope.scaling.factor")
    original_context: PositiveInt | None = Field(None, alias="rope.scaling.original_context_length")
    attention_factor: NonNegativeFloat = Field(0.0, alias="rope.scaling.attn_factor")
    yarn_beta_fast: float = Field(32.0, ge=1e-3, le=1e6, alias="rope.scaling.yarn_beta_fast")
    yarn_beta_slow: float = Field(1.0, ge=1e-3, le=1e6, alias="rope.scaling.yarn_beta_slow")

    def ropes(
        self, where: str, family: Family, config: Config, factors: Mapping[str, Array]
    ) -> tuple[Rope, Rope]:
        """Return the rotation of layers without a window, and of layers with one.

        `factors` are the tensors of FACTORS in the file. Raises BuildError for unsupported rotations.
        """
        size, theta = config.head_size, config.rope_theta or 10000.0
        rotated = self.dimensions or size
        if family.gguf.finetuned_rotates and not self.is_finetuned:
            raise unsupported(where, "a model without rotation")
        if family.gguf.pairs and rotated != size:
            raise unsupported(where, "a rotary embedding of a part of the head")
        if odd := next((n for n, f in factors.items() if f.shape != (rotated // 2,)), None):
            raise unsupported(where, f"a `{odd}` of shape {factors[odd].shape}")
        scaling = self._scaling(where, factors, family.gguf.yarn_truncates)
        if ROPE_FACTORS in factors:
            if scaling is not None:
                raise unsupported(where, f"a rotary scaling in addition to `{ROPE_FACTORS}`")
            scaling = _llama3_scaling(where, factors[ROPE_FACTORS].astype(np.float64), size, theta)
        rope = local = Rope(theta=theta, scaling=scaling, dim=None if rotated == size else rotated)
        if config.rope_local_base_freq is not None:
            local = Rope(theta=config.rope_local_base_freq, dim=rope.dim, name="local")
        return rope, local

    def _scaling(self, where: str, factors: Mapping[str, Array], yarn_truncates: bool) -> RopeScaling | None:
        """Return the scaling; a factor of 0 stands for none, as in llama.cpp."""
        is_scaled = self.factor not in (0.0, 1.0)
        if SHORT_FACTORS in factors and LONG_FACTORS in factors and not is_scaled:
            return self._longrope(factors)
        if self.attention_factor not in (0.0, 1.0):
            raise unsupported(where, f"a factor of {self.attention_factor} on the rotation")
        match self.kind:
            case "none" if not is_scaled:
                return None
            case "linear":
                return LinearScaling(factor=self.factor) if is_scaled else None
            case "yarn" if self.yarn_beta_fast > self.yarn_beta_slow:
                return self._yarn(yarn_truncates) if is_scaled else None
        raise unsupported(where, f"rotary scaling `{self.kind}` by {self.factor}")

    def _longrope(self, factors: Mapping[str, Array]) -> LongRopeScaling:
        short, long = (tuple(map(float, factors[name])) for name in (SHORT_FACTORS, LONG_FACTORS))
        return LongRopeScaling(
            short_factors=short,
            long_factors=long,
            original_max_position_embeddings=self.original_context or self.context_length,
            attention_factor=self.attention_factor or 1.0,
        )

    def _yarn(self, truncates: bool) -> YarnScaling:
        return YarnScaling(
            factor=self.factor,
            original_max_position_embeddings=self.original_context or self.context_length,
            attention_factor=yarn_attention_factor(self.factor),
            beta_fast=self.yarn_beta_fast,
            beta_slow=self.yarn_beta_slow,
            truncate=truncates,
        )


def _llama3_scaling(where: str, factors: Array, head_dim: int, theta: float) -> Llama3Scaling:
    """Return the scaling that makes ROPE_FACTORS. Raises BuildError if it is not Llama 3's."""
    scaling = Llama3Scaling(
        factor=round(float(factors.max(initial=1.0)), 4),
        low_freq_factor=LLAMA3_LOW_FREQ_FACTOR,
        high_freq_factor=LLAMA3_HIGH_FREQ_FACTOR,
        original_max_position_embeddings=LLAMA3_ORIGINAL_CONTEXT,
    )
    expected = rope_factors(scaling, head_dim, theta)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise unsupported(where, f"a `{ROPE_FACTORS}` that does not follow Llama 3's rule")
    return scaling


def rope_factors(scaling: Llama3Scaling, head_dim: int, theta: float) -> npt.NDArray[np.float64]:
    """Return the divisors of the rotary frequencies, `[head_dim / 2]`."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return np.asarray(frequencies / scaling.scaled(frequencies, theta, LLAMA3_ORIGINAL_CONTEXT))
