from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from shortfin_apps.llm.builder.self_test.make import MAX_TOLERANCE, make_self_test, tolerance_of
from shortfin_apps.llm.builder.self_test.stored_weights import StoredWeights
from shortfin_apps.llm.builder.sources.base import TokenizerFiles
from shortfin_apps.llm.builder.sources.random_tiny import SPEC, RandomTinySource
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.self_test_file import SelfTestFile, TestLayout
from shortfin_apps.llm.model.feed_forward import MoE
from shortfin_apps.llm.model.kv_layout import KVType
from shortfin_apps.llm.model.reference.forward import forward
from shortfin_apps.llm.model.spec import BuildOptions, WeightType
from tests.builder.specs import with_experts

OPTIONS = BuildOptions(context_length=128)
ROUTED = with_experts(SPEC, MoE(count=4, per_token=2, features=32))


def made(options: BuildOptions = OPTIONS) -> SelfTestFile:
    steps: list[int] = []
    file = make_self_test(RandomTinySource(), options, resolve_target("cpu"), steps.append)
    assert sum(steps) == len(SPEC.layers)
    return file


class HostileSource(RandomTinySource):
    """Its tokenizer is `text`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def tokenizer_files(self) -> TokenizerFiles:
        return replace(super().tokenizer_files(), tokenizer=self._text)


def test_a_tokenizer_that_is_not_usable_is_one_sentence() -> None:
    tokenizer = Tokenizer.from_str(RandomTinySource().tokenizer_files().tokenizer)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("^([A-Za-z ]+)+$"), "isolated")
    for text in ("no tokenizer", tokenizer.to_str()):
        with pytest.raises(BuildError, match=r"tokenizer\.json is not usable \("):
            make_self_test(HostileSource(text), OPTIONS, resolve_target("cpu"), lambda _: None)


def test_its_logits_are_the_references() -> None:
    file = made()
    stored = StoredWeights(RandomTinySource(), OPTIONS, resolve_target("cpu"))
    weights = {name: stored.whole(name) for name in stored.names}
    spec = replace(SPEC, max_position_embeddings=128)
    for prompt in file.prompts:
        logits = forward(spec, weights, np.array(prompt.token_ids))
        assert [each.position for each in prompt.logits] == list(TestLayout.of(16, 128).checked)
        for each in prompt.logits:
            row = logits[each.position]
            np.testing.assert_allclose(each.sampled, row[list(file.sample_ids)], rtol=1e-4, atol=1e-4)
            assert list(each.best_ids) == np.argsort(-row, kind="stable")[: len(each.best_ids)].tolist()
            np.testing.assert_allclose(each.best, row[list(each.best_ids)], rtol=1e-4)


def test_it_is_the_same_each_time_and_comes_back_from_its_file() -> None:
    file = made()
    assert file == made()
    assert SelfTestFile.from_json(file.to_json()) == file


def test_it_has_sums_of_each_layer_and_segment() -> None:
    file = made()
    segments = TestLayout.of(16, 128).summed
    for prompt in file.prompts:
        found = [(each.layer, each.start, each.stop) for each in prompt.pages]
        assert found == [(n, *segment) for n in range(len(SPEC.layers)) for segment in segments]


def test_a_short_context_has_a_shorter_prompt() -> None:
    file = made(replace(OPTIONS, context_length=20))
    assert {len(prompt.token_ids) for prompt in file.prompts} == {20}


def test_of_another_device_it_is_made_here() -> None:
    options = BuildOptions.for_device("hip:gfx942", context_length=64, weights="fp8")
    file = make_self_test(RandomTinySource(), options, resolve_target("hip:gfx942"), lambda count: None)
    assert file.tolerance == 1.0


@pytest.mark.parametrize("weights", get_args(WeightType))
@pytest.mark.parametrize("kv", get_args(KVType))
def test_every_type_has_a_tolerance_that_unrelated_logits_exceed(weights: WeightType, kv: KVType) -> None:
    options = BuildOptions(weights=weights, kv=kv)
    assert 0 < tolerance_of(SPEC, options) <= tolerance_of(ROUTED, options) <= MAX_TOLERANCE < 2**0.5


def test_12_bits_are_as_fine_as_bf16() -> None:
    coarse, fine, finest = (BuildOptions(weights="q4", activation_bits=bits) for bits in (8, 12, 16))
    assert tolerance_of(SPEC, fine) == tolerance_of(SPEC, finest) == tolerance_of(SPEC, BuildOptions())
    assert tolerance_of(SPEC, fine) < tolerance_of(SPEC, coarse)


def test_a_narrow_cache_widens_the_tolerance_of_wide_weights() -> None:
    wide, narrow = BuildOptions(weights="f32", kv="f32"), BuildOptions(weights="f32", kv="bf16")
    assert tolerance_of(SPEC, wide) < tolerance_of(SPEC, narrow)
