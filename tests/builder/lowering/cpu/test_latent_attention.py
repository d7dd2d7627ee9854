"""Latent attention of published sizes on this CPU: the reference's logits, the same bits in all entries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shortfin_apps.llm.builder.lowering.cpu.latent_attention import head_groups
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.components.runtime.iree_local import open_local_task
from shortfin_apps.llm.model.feed_forward import MLP
from shortfin_apps.llm.model.latent_attention import LatentAttention
from shortfin_apps.llm.model.rope import Rope
from shortfin_apps.llm.model.spec import BuildOptions, WeightType
from tests.builder.agreement import expect, prefill_row
from tests.builder.compiled_model import TINY, CompiledModel

BLOCK = LatentAttention(heads=20, rank=512, plain=192, rotated=64, value_dim=256, rope=Rope())


@pytest.fixture(scope="module")
def device() -> Device:
    return open_local_task()


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (10, 1), (16, 2), (20, 2), (128, 16), (11, 11)])
def test_results_of_a_group_fit_a_workers_stack(heads: int, groups: int) -> None:
    assert head_groups(replace(BLOCK, heads=heads)) == groups


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "f32"])
def test_every_entry_computes_the_same_bits(device: Device, tmp_path: Path, weights: WeightType) -> None:
    spec = replace(TINY, layers=2 * ((BLOCK, MLP(features=128)),))
    options = BuildOptions(
        weights=weights,
        kv="f32" if weights == "f32" else "bf16",
        prefill_batch_sizes=(1,),
        decode_batch_sizes=(1, 4),
        top_k=8,
    )
    model = CompiledModel.build(spec, options, device, tmp_path)
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, 60)
    table = np.arange(1, 17).reshape(4, 4)
    whole = prefill_row(model, tokens, table[:1], 64).logits[0]
    expect(model, whole, tokens)
    parts = prefill_row(model, tokens, table[:1], 48).logits[0]
    packed, offsets = np.r_[tokens[48:], tokens[:3]], np.array([0, 12])
    starts, seq_lens = np.array([48, 0]), np.array([60, 3])
    extended = model.extend("extend", packed, offsets, starts, seq_lens, table[:2]).logits[0]
    prefill_row(model, tokens[:-1], table[:1], 64)
    last = np.array([[tokens[-1]], [3], [4], [5]])
    decoded = model.decode("decode_bs1", last[:1], np.array([59]), table[:1]).logits[0]
    with_others = model.decode("decode_bs4", last, np.array([59, 0, 0, 0]), table).logits[0]
    for other in (parts, extended, decoded, with_others):
        np.testing.assert_array_equal(other, whole)
