"""The self-test on an emulated AMD GPU: it passes, and finds a GPU that miscomputes and a flipped bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shortfin_apps.llm.builder.sources.random_tiny import LATENT_SPEC, SPEC
from shortfin_apps.llm.model.latent_attention import LatentAttention
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec
from tests.components.self_test.compiled import Miscomputing, build_model, opened
from tests.hip import CHIPS, EmulatedGpus

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(400)]

CHIP = CHIPS[0]
# An entry of each kind.
OPTIONS = BuildOptions(
    device=f"hip:{CHIP}",
    prefill_batch_sizes=(1,),
    decode_batch_sizes=(2,),
    extend_sizes=(48,),
    context_length=64,
    top_k=8,
)


KEYS = SPEC.attention.q_features * SPEC.hidden_size
[LATENT] = LATENT_SPEC.blocks_of(LatentAttention)


# With the element of a weight to flip: the first that projects keys.
@pytest.mark.parametrize(
    ("spec", "weight", "element"),
    [
        (SPEC, "blk.1.attn_qkv.weight", KEYS),
        (LATENT_SPEC, "blk.1.attn_q_kv_a.weight", (LATENT.query_rank or 0) * SPEC.hidden_size),
    ],
    ids=["tiny", "tiny-latent"],
)
def test_it_passes_and_finds_what_is_wrong(
    tmp_path: Path,
    emulated_gpus: EmulatedGpus,
    monkeypatch: pytest.MonkeyPatch,
    spec: ModelSpec,
    weight: str,
    element: int,
) -> None:
    built = build_model(tmp_path, spec, OPTIONS)
    with emulated_gpus.watch(CHIP):
        with opened(built, device=emulated_gpus.open(CHIP)) as model:
            outcome = model.self_test.run()
            assert outcome.failures() == []
            assert outcome.untested == []
            assert sorted(outcome.entries) == sorted(model.program.entries)
            device = Miscomputing(model.device)
            monkeypatch.setattr(model.runner, "_device", device)
            device.is_wrong = True
            again = model.self_test.run()
            failed = {each.entry for each in again.failures(known_bits=outcome.bits)}
            assert failed >= {"prefill_bs1", "decode_bs2", "extend_t48"}
        built.flip(weight, 2, element, 14)
        with opened(replace(built), device=emulated_gpus.open(CHIP)) as model:
            outcome = model.self_test.run()
            failures = outcome.failures()
            assert len(failures) >= 3
            location = model.locator(same_bits=False).locate_first(failures, outcome)
    assert location is not None
    assert (location.layer, location.what) == (1, "keys")
