"""Tiny models in f32, for which a GPU must choose the same tokens as a CPU.

They are the models of `random:NAME`, and variants with similar weights for features that these lack.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shortfin_apps.llm.builder.sources.random_tiny import HYBRID_SPEC, SPEC
from shortfin_apps.llm.model.experts import RoutedExperts
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec

OPTIONS = BuildOptions(
    weights="f32",
    kv="f32",
    prefill_batch_sizes=(1, 4),
    decode_batch_sizes=(1, 8),
    decode_loop_sizes=(1, 8),
    top_k=64,
)

_GEMMA = replace(
    SPEC,
    name="tiny-gemma",
    num_hidden_layers=4,
    embedding_scale=8.0,
    activation="gelu",
    qk_norm=True,
    norms_after=True,
    score_cap=20.0,
    logit_cap=30.0,
    window=40,
    windowed_layers=(0, 1, 2),
    local_rope_theta=1000.0,
)
_GPT_OSS = replace(
    SPEC,
    name="tiny-gpt-oss",
    architecture="gpt-oss",
    qkv_bias=True,
    output_bias=True,
    activation="clamped",
    window=40,
    windowed_layers=(0,),
    has_sinks=True,
    experts=RoutedExperts(count=8, per_token=3, features=64, has_biases=True),
)
_EXPERTS = replace(
    SPEC,
    name="tiny-experts",
    num_hidden_layers=3,
    qk_norm=True,
    experts=RoutedExperts(count=8, per_token=2, features=64, dense_layers=(1,)),
)
_BYTES = replace(SPEC, name="tiny-kv-q8_0")


def tiny_models() -> Iterator[tuple[ModelSpec, BuildOptions]]:
    for spec in (SPEC, HYBRID_SPEC, _GEMMA, _GPT_OSS, _EXPERTS):
        yield spec, OPTIONS
    yield _BYTES, replace(OPTIONS, kv="q8_0")
