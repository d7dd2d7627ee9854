"""Tiny models in f32, for which a GPU must choose the same tokens as a CPU.

They are the models of `random:NAME`, and variants with similar weights for features that these lack.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shortfin_apps.llm.builder.sources.random_tiny import HYBRID_SPEC, LATENT_SPEC, SPEC
from shortfin_apps.llm.model.eagle_head import EagleHead
from shortfin_apps.llm.model.feed_forward import MLP, MoE
from shortfin_apps.llm.model.rope import Rope
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec

OPTIONS = BuildOptions(
    weights="f32",
    kv="f32",
    prefill_batch_sizes=(1, 4),
    decode_batch_sizes=(1, 8),
    decode_loop_sizes=(1, 8),
    top_k=64,
)

_ATTENTION = SPEC.attention
_GEMMA_ATTENTION = replace(_ATTENTION, cap=20.0, qk_norm=True, norm_after=True)
_GEMMA_WINDOWED = replace(_GEMMA_ATTENTION, window=40, rope=Rope(theta=1000.0, name="local"))
_GEMMA_MLP = MLP(features=128, activation="gelu", norm_after=True)
_GEMMA = replace(
    SPEC,
    name="tiny-gemma",
    layers=(*(3 * ((_GEMMA_WINDOWED, _GEMMA_MLP),)), (_GEMMA_ATTENTION, _GEMMA_MLP)),
    embedding_scale=8.0,
    logit_cap=30.0,
)
_GPT_OSS_ATTENTION = replace(_ATTENTION, sinks=True, bias=True, output_bias=True)
_GPT_OSS_EXPERTS = MoE(count=8, per_token=3, features=64, activation="clamped", biases=True)
_GPT_OSS = replace(
    SPEC,
    name="tiny-gpt-oss",
    architecture="gpt-oss",
    layers=(
        (replace(_GPT_OSS_ATTENTION, window=40), _GPT_OSS_EXPERTS),
        (_GPT_OSS_ATTENTION, _GPT_OSS_EXPERTS),
    ),
)
_NORMED, _ROUTED = replace(_ATTENTION, qk_norm=True), MoE(count=8, per_token=2, features=64)
_EXPERTS = replace(
    SPEC,
    name="tiny-experts",
    layers=((_NORMED, _ROUTED), (_NORMED, MLP(features=128)), (_NORMED, _ROUTED)),
)
_EAGLE = replace(
    SPEC,
    name="tiny-eagle",
    draft=EagleHead(
        blocks=(replace(_ATTENTION, norm_before=False), SPEC.layers[0][1]),
        reads=(1, 2, 1),
        vocab_size=SPEC.vocab_size,
    ),
)
_BYTES = replace(SPEC, name="tiny-kv-q8_0")


def tiny_models() -> Iterator[tuple[ModelSpec, BuildOptions]]:
    for spec in (SPEC, HYBRID_SPEC, LATENT_SPEC, _GEMMA, _GPT_OSS, _EXPERTS, _EAGLE):
        yield spec, OPTIONS
    yield _BYTES, replace(OPTIONS, kv="q8_0")
