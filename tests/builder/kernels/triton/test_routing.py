"""Each token's experts, and the tiles that have one expert each, against numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.batch import Batch, Slab
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.model.feed_forward import MoE, route
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.compiled_model import ROUTED
from tests.builder.kernels.triton.conftest import Launch, context_of
from tests.builder.kernels.triton.launched import Inputs, Launched
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Tuning
from shortfin_apps.llm.builder.lowering.triton.experts import ExpertTiles, TritonExperts
from shortfin_apps.llm.builder.lowering.triton.layers import TritonLayers
from shortfin_apps.llm.builder.lowering.triton.tiles import MatmulTile
from tests.builder.specs import with_experts

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(300)]

I32 = npt.NDArray[np.int32]
STRIDE = 16
FEW = MoE(count=5, per_token=2, features=96)
MANY = MoE(count=130, per_token=9, features=96, is_normalised=False)
ALL = MoE(count=4, per_token=4, features=96)


def batch_with(slots: Tensor) -> Batch:
    """A batch of which only the slots are known."""
    batch = Batch.__new__(Batch)
    batch.slab = Slab.__new__(Slab)
    batch.slots = slots
    return batch


def routing_of(
    experts: MoE, tokens: int | str, chip: str, launch: Launch, has_scores: bool = False
) -> tuple[Launched, int]:
    """The program that returns weights, chosen experts, order and the tiles' experts; and a tile's rows."""
    spec = with_experts(ROUTED, experts)
    options = BuildOptions(device=f"hip:{chip}", weights="f32", kv="f32", block_seq_stride=STRIDE)
    context = context_of(spec, chip, options)
    made: list[ExpertTiles] = []

    def body(e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
        batch, scores = batch_with(tensors["slots"]), tensors.get("scores")
        routing = TritonLayers(context).route(e, tensors["logits"], batch, scores)
        made.append(routing)
        return [routing.weights, routing.chosen, routing.order, routing.tile_experts]

    of_experts = ("logits", "scores") if has_scores else ("logits",)
    inputs: Inputs = {
        **dict.fromkeys(of_experts, ("f32", (tokens, experts.count))),
        "slots": ("i64", (tokens,)),
    }
    return launch(inputs, body, context), made[0].tile_rows


def check_tiles(experts: MoE, chosen: I32, order: I32, tile_experts: I32) -> None:
    """Every expert's rows are in tiles of it, in ascending order, and in no other."""
    count, rows = experts.count, len(chosen)
    used = np.flatnonzero(tile_experts < count)
    np.testing.assert_array_equal(used, np.arange(len(used)))
    for expert in range(count):
        own = order[tile_experts == expert].reshape(-1)
        expected = np.flatnonzero(chosen == expert)
        np.testing.assert_array_equal(own[: len(expected)], expected)
        assert (own[len(expected) :] == rows).all()
        assert len(own) - len(expected) < order.shape[1]


@pytest.mark.parametrize("experts", [FEW, MANY, ALL], ids=["few", "many", "all"])
@pytest.mark.parametrize("tokens", [1, 33, "tokens"])
def test_tokens_have_their_experts_and_tiles_have_one(
    experts: MoE, tokens: int | str, chip: str, launch: Launch
) -> None:
    program, tile_rows = routing_of(experts, tokens, chip, launch)
    for number, count in enumerate([2, 70, 150] if isinstance(tokens, str) else [tokens] * 3):
        rng = np.random.default_rng(number)
        logits = rng.integers(0, [3, 1 << 20, 2][number], (count, experts.count)).astype(np.float32)
        logits /= max(1, logits.max())
        if number == 2:  # one expert has nearly everything
            logits[:, 1] = 2
        slots = rng.integers(STRIDE - 3, STRIDE + 20, count)
        weights, chosen, order, tile_experts = program(logits=logits, slots=slots)
        expected, shares = route(experts, logits)
        is_padding = slots < STRIDE
        np.testing.assert_array_equal(
            chosen.reshape(expected.shape), np.where(is_padding[:, None], experts.count, expected)
        )
        np.testing.assert_allclose(
            weights.reshape(shares.shape), np.where(is_padding[:, None], 0, shares), rtol=1e-5
        )
        check_tiles(experts, chosen, order.reshape(-1, tile_rows), tile_experts)


def test_tiles_may_have_8_rows(monkeypatch: pytest.MonkeyPatch, chip: str, launch: Launch) -> None:
    """As for few rows of experts in floats of 4 bits on Hopper."""
    small = MatmulTile(8, 32, 512, Tuning(4, 5), parts=4)
    monkeypatch.setattr(TritonExperts, "_own_tile", lambda self, average: small)
    program, tile_rows = routing_of(FEW, "tokens", chip, launch)
    assert tile_rows == 8
    for count in (1, 8, 33):
        logits = np.random.default_rng(count).standard_normal((count, FEW.count), np.float32)
        _, chosen, order, tile_experts = program(logits=logits, slots=np.full(count, STRIDE))
        check_tiles(FEW, chosen, order.reshape(-1, tile_rows), tile_experts)


def test_a_token_that_is_not_a_number_has_some_experts_and_no_weights(chip: str, launch: Launch) -> None:
    program, tile_rows = routing_of(FEW, "tokens", chip, launch)
    logits = np.random.default_rng(0).standard_normal((6, FEW.count), np.float32)
    logits[1, 3], logits[4] = np.nan, np.nan
    weights, chosen, order, tile_experts = program(logits=logits, slots=np.full(6, STRIDE))
    weights, by_token = weights.reshape(6, -1), chosen.reshape(6, -1)
    assert np.isnan(weights[[1, 4]]).all()
    assert np.isfinite(weights[[0, 2, 3, 5]]).all()
    assert ((by_token >= 0) & (by_token < FEW.count)).all()
    check_tiles(FEW, chosen, order.reshape(-1, tile_rows), tile_experts)


@pytest.mark.parametrize("experts", [replace(FEW, scale=2.5), MANY], ids=["few", "many"])
def test_weights_are_given_scores_of_preferred_experts(experts: MoE, chip: str, launch: Launch) -> None:
    """Experts that cannot be chosen have a preference of -inf."""
    program, _ = routing_of(experts, "tokens", chip, launch, has_scores=True)
    rng = np.random.default_rng(3)
    preferences, scores = rng.standard_normal((2, 20, experts.count)).astype(np.float32)
    scores = np.abs(scores)
    preferences[:, : experts.count // 2] = -np.inf
    weights, chosen, *_ = program(logits=preferences, scores=scores, slots=np.full(20, STRIDE))
    expected = np.argsort(-preferences, axis=1, kind="stable")[:, : experts.per_token]
    np.testing.assert_array_equal(chosen.reshape(expected.shape), expected)
    shares = np.take_along_axis(scores, expected, axis=1)
    if experts.is_normalised:
        shares /= shares.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights.reshape(shares.shape), shares * experts.scale, rtol=1e-5)
