"""Tolerances of logits against the reference, in standard deviations (`SelfTestFile`).

The reference uses the stored weights and an 8-bit cache, so only the rounding of activations and the order of
sums differ. For SmolLM2-135M, the largest errors over all entries on CPUs with AVX-512 and AVX2 were 0.055 in
bf16, 0.16 in q8_0, 0.26 in q4, 0.87 in int8 for random tokens and 0.41 for text, and less than 1e-4 in f32
(docs/self_test.md). Unrelated logits are off by 1.4.
"""

from __future__ import annotations

from shortfin_apps.llm.model.kv_layout import KVType
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, WeightType

BY_WEIGHTS: dict[WeightType, float] = {
    "f32": 0.002,
    "f16": 0.03,
    "bf16": 0.15,
    "q8_0": 0.6,
    "q4": 0.6,
    "int8": 1.0,
    "fp8": 1.0,
}
# For caches in a narrower type than the activations.
BY_KV: dict[KVType, float] = {"f32": 0.0, "f16": 0.03, "bf16": 0.15, "q8_0": 0.15}
ROUTED = 2.0  # a rounding may choose another expert
LARGEST = 1.0


def tolerance_of(spec: ModelSpec, options: BuildOptions) -> float:
    """Return the largest allowed error."""
    of_types = max(BY_WEIGHTS[options.weights], BY_KV[options.kv])
    return min(LARGEST, of_types * (ROUTED if spec.experts is not None else 1))
