from __future__ import annotations

from typing import get_args

import pytest

from shortfin_apps.llm.builder.self_test.tolerances import LARGEST, tolerance_of
from shortfin_apps.llm.builder.sources.random_tiny import SPEC
from shortfin_apps.llm.model.feed_forward import MoE
from shortfin_apps.llm.model.kv_layout import KVType
from shortfin_apps.llm.model.spec import BuildOptions, WeightType
from tests.builder.specs import with_experts

ROUTED = with_experts(SPEC, MoE(count=4, per_token=2, features=32))


@pytest.mark.parametrize("weights", get_args(WeightType))
@pytest.mark.parametrize("kv", get_args(KVType))
def test_every_type_has_one_that_unrelated_logits_exceed(weights: WeightType, kv: KVType) -> None:
    options = BuildOptions(weights=weights, kv=kv)
    assert 0 < tolerance_of(SPEC, options) <= tolerance_of(ROUTED, options) <= LARGEST < 2**0.5


def test_a_narrow_cache_widens_that_of_wide_weights() -> None:
    wide, narrow = BuildOptions(weights="f32", kv="f32"), BuildOptions(weights="f32", kv="bf16")
    assert tolerance_of(SPEC, wide) < tolerance_of(SPEC, narrow)
