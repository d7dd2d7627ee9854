"""Gated delta nets of heads that take several waves, against numpy: packed rows, then a decode of each."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.batch import Batch, Slab
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext
from shortfin_apps.llm.model.block import ReferenceLayer
from shortfin_apps.llm.model.delta_net import DeltaNet, DeltaRule
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.compiled_model import HYBRID
from tests.builder.kernels.triton.conftest import Launch, context_of
from tests.builder.kernels.triton.given_weights import GivenWeights
from tests.builder.kernels.triton.launched import Array, Inputs
from tests.builder.specs import with_blocks
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.lowering.triton.delta_net import TritonDeltaNet

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(300)]

F32 = npt.NDArray[np.float32]
STRIDE = 4
LENGTHS = (6, 1)  # of the rows
PADDING = 2  # tokens behind them
TABLE = np.array([[3, 1], [2, 0]])
OPERATION = DeltaRule("mixed", "out", 2, "rates", conv="conv", steps="steps", norm="norm")
NETS = {
    "several-waves": DeltaNet(key_heads=1, value_heads=2, key_dim=128, value_dim=128),
    "odd": DeltaNet(key_heads=2, value_heads=4, key_dim=72, value_dim=40, taps=3, tiled=True),
}


def inputs_of(net: DeltaNet) -> Inputs:
    return {
        "mixed": ("f32", ("tokens", net.channels + net.value_features)),
        "rates": ("f32", ("tokens", 2 * net.value_heads)),
        "conv": ("f32", (net.taps, net.channels)),
        "steps": ("f32", (2 * net.value_heads,)),
        "norm": ("f32", (net.value_dim,)),
        **dict.fromkeys(("offsets", "starts", "seq_lens"), ("i64", ("rows",))),
        "blocks": ("i64", ("rows", "width")),
        "cache": ("f32", ("pages", 2 * net.state_elements)),
    }


def body_of(
    context: LoweringContext, chunk: int | None, e: Emitter, tensors: dict[str, Tensor]
) -> list[Tensor]:
    """Tokens are packed, or `chunk` of each row; the result and the cache."""
    given = {name: tensors[name] for name in ("conv", "steps", "norm")}
    [rows], (tokens, _) = tensors["starts"].shape, tensors["mixed"].shape
    slab = Slab(pool="state", layers=(0, 2), blocks=tensors["blocks"], cache=tensors["cache"])
    batch = Batch(
        rows=rows,
        tokens=tokens,
        chunk=chunk,
        whole_pages=False,
        starts=tensors["starts"],
        seq_lens=tensors["seq_lens"],
        slabs=[slab],
    )
    batch.offsets = tensors["offsets"]
    batch.followers = tensors.get("followers")
    kernels = TritonDeltaNet(replace(context, weights=GivenWeights(given)))
    return [kernels.delta_rule(e, OPERATION, tensors["mixed"], tensors["rates"], batch), batch.cache]


def random_arguments(net: DeltaNet, tokens: int) -> dict[str, Array]:
    rng = np.random.default_rng(tokens)
    shapes = {"mixed": (tokens, net.channels + net.value_features), "rates": (tokens, 2 * net.value_heads)}
    weights = {"conv": (net.taps, net.channels), "steps": (2 * net.value_heads,), "norm": (net.value_dim,)}
    given = {name: rng.standard_normal(shape, np.float32) for name, shape in (shapes | weights).items()}
    given["steps"][net.value_heads :] = -np.abs(given["steps"][net.value_heads :])  # states decay
    return given


def reference(net: DeltaNet, given: dict[str, Array], tokens: list[int]) -> F32:
    """[tokens, value features] of a row's tokens: as if these were projected from unit vectors."""
    block = {
        "ssm_in.weight": given["mixed"][tokens].T,
        "ssm_rates.weight": given["rates"][tokens].T,
        "ssm_conv1d.weight": given["conv"].T,
        "ssm_steps.bias": given["steps"],
        "ssm_norm.weight": given["norm"],
    }
    layer = ReferenceLayer(
        weights=block,
        rms_norm_eps=HYBRID.rms_norm_eps,
        max_position_embeddings=HYBRID.max_position_embeddings,
    )
    return net.gated_values(np.eye(len(tokens), dtype=np.float32), layer)


@pytest.mark.parametrize("name", NETS)
def test_rows_are_computed_token_by_token(chip: str, launch: Launch, name: str) -> None:
    """First all tokens of a row but the last, then that as a decode."""
    net, first = NETS[name], sum(LENGTHS) + PADDING
    given = random_arguments(net, first + len(LENGTHS))
    options = BuildOptions(device=f"hip:{chip}", weights="f32", kv="f32", block_seq_stride=STRIDE)
    context = context_of(with_blocks(HYBRID, {0: net, 2: net}), chip, options)
    packed, decode = (
        launch(inputs_of(net), partial(body_of, context, chunk), context) for chunk in (None, 1)
    )
    weights = {each: given[each] for each in ("conv", "steps", "norm")}
    cache = np.full((4, 2 * net.state_elements), np.nan)
    zeros, lengths = np.zeros(len(LENGTHS)), np.array(LENGTHS)
    of_rows = {"starts": zeros, "seq_lens": lengths, "blocks": TABLE, "offsets": lengths.cumsum() - lengths}
    tokens = {each: given[each][:first] for each in ("mixed", "rates")}
    out, cache = packed(**weights, **of_rows, **tokens, cache=cache)
    of_rows |= {"starts": lengths, "seq_lens": lengths + 1}
    tokens = {each: given[each][first:] for each in ("mixed", "rates")}
    decoded, cache = decode(**weights, **of_rows, **tokens, cache=cache)
    begin = 0
    for row, length in enumerate(LENGTHS):
        own = [*range(begin, begin + length), first + row]
        expected = reference(net, given, own)
        np.testing.assert_allclose(out[begin : begin + length], expected[:-1], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(decoded[row], expected[-1], rtol=1e-3, atol=1e-4)
        begin += length
    np.testing.assert_array_equal(out[begin:], 0)
    assert np.isnan(cache[0]).all()


@pytest.mark.parametrize("name", NETS)
def test_followers_go_on_from_the_row_before_and_leave_a_state_each(
    chip: str, launch: Launch, name: str
) -> None:
    """A row of six tokens; then a token of it with two followers, after a row of another sequence."""
    net, (length, other) = NETS[name], LENGTHS
    given = random_arguments(net, length + other + 3)
    options = BuildOptions(device=f"hip:{chip}", weights="f32", kv="f32", block_seq_stride=STRIDE)
    context = context_of(with_blocks(HYBRID, {0: net, 2: net}), chip, options)
    inputs: Inputs = {**inputs_of(net), "followers": ("i64", ("rows",))}
    packed = launch(inputs, partial(body_of, context, None), context)
    weights = {each: given[each] for each in ("conv", "steps", "norm")}
    cache = np.full((8, 2 * net.state_elements), np.nan)
    own = [*range(length), *range(length + other, length + other + 3)]
    expected = reference(net, given, own)

    def run(tokens: list[int], cache: Array, **of_rows: list[int] | list[list[int]]) -> tuple[Array, Array]:
        arrays = {each: np.array(values) for each, values in of_rows.items()}
        of_tokens = {each: given[each][tokens] for each in ("mixed", "rates")}
        out, written = packed(**weights, **of_tokens, **arrays, cache=cache)
        return out, written

    _, cache = run(
        own[:length], cache, offsets=[0], starts=[0], seq_lens=[length], followers=[0], blocks=[[3, 1]]
    )
    out, cache = run(
        [length, *own[length:]],
        cache,
        offsets=[0, 1, 2, 3],
        starts=[0, length, length + 1, length + 2],
        seq_lens=[1, length + 1, length + 2, length + 3],
        followers=[0, 2, -1, -1],
        blocks=[[2, 0, 0], [7, 1, 0], [7, 4, 0], [7, 0, 5]],
    )
    np.testing.assert_allclose(out[0], reference(net, given, [length])[0], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(out[1:], expected[length:], rtol=1e-3, atol=1e-4)
    half = slice(net.state_elements, None)  # of the second of the two layers
    is_written = [bool(np.isfinite(page[half]).all()) for page in cache]
    assert is_written == [False, True, True, True, True, True, False, False]
    for followed, page, count in ((1, 1, 1), (2, 4, 2)):  # any of the states can be gone on from
        again, _ = run(
            own[length + count :][:1],
            cache,
            offsets=[0],
            starts=[length + followed],
            seq_lens=[length + followed + 1],
            followers=[0],
            blocks=[[7, page, 6]],
        )
        np.testing.assert_array_equal(again[0], out[1 + count])
