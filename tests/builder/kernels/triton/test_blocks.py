"""Weights in quantised blocks, in the embedding and every matmul, against numpy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.batch import Batch, Slab
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Tuning
from shortfin_apps.llm.builder.lowering.lowering import Lowering, RenderedKernels, Values
from shortfin_apps.llm.builder.weights.layout import BlockRows
from shortfin_apps.llm.model.attention import Attend
from shortfin_apps.llm.model.operations import Embed, GatedLinear, Linear, Norm, Operation
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.model.weight_blocks import MXFP4, Q4_1, Q8_0, Blocks, BlockType
from tests.builder.compiled_model import TINY
from tests.builder.kernels.triton.conftest import Launch, context_of
from tests.builder.kernels.triton.given_weights import GivenWeights
from tests.builder.kernels.triton.launched import Array, Inputs, rounded
from tests.builder.random_blocks import GROUPED, random_blocks
from tests.builder.specs import ffn_features
from tests.hip import CHIPS
from tests.matrices import every_pair
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.lowering.triton import layers
from shortfin_apps.llm.builder.lowering.triton.layers import TritonLayers
from shortfin_apps.llm.builder.lowering.triton.tiles import MatmulTile, Use, tiles_of
from tests.builder.specs import changed

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(300)]

F32 = npt.NDArray[np.float32]
# Rows of weights that end within a tile.
SPEC = changed(TINY, {"hidden_size": 96, "features": 160, "vocab_size": 70})
STRIDE, LAYER, PAGES = 16, 1, 90
OPTIONS = BuildOptions(weights="q8_0", kv="f32", block_seq_stride=STRIDE)
TOLERANCE = 8e-2
KINDS = [Q8_0, Q4_1]
# Numbers of tokens that are known when a kernel is compiled, or not.
TILED = [1, 16, 30, 50, "tokens"]
EVERY_PAIR = pytest.mark.parametrize(("tokens", "kind", "chip"), every_pair(TILED, KINDS, CHIPS), ids=str)


class Given:
    """Weights by name, as blocks or floats, and what a program takes for them."""

    def __init__(self, weights: Mapping[str, Blocks | F32]) -> None:
        self.inputs: dict[str, tuple[str, tuple[int | str, ...]]] = {}
        self.arguments: dict[str, Array] = {}
        self._parameters: dict[str, str] = {}
        self._blocks: dict[str, BlockType] = {}
        for name, weight in weights.items():
            if not isinstance(weight, Blocks):
                self._add(name, weight, "f32")
                continue
            layout = BlockRows(weight.type)
            self._blocks[name] = weight.type
            stored = layout.stored(name, weight.quants.shape)
            for (parameter, (_, dtype)), value in zip(stored.items(), layout.store(weight), strict=True):
                self._add(parameter, value, dtype)

    def _add(self, parameter: str, value: Array, dtype: str) -> None:
        argument = parameter.replace(".", "_")
        self._parameters[parameter] = argument
        self.inputs[argument] = (dtype, value.shape)
        self.arguments[argument] = value

    def weights(self, tensors: Mapping[str, Tensor]) -> GivenWeights:
        given = {name: tensors[argument] for name, argument in self._parameters.items()}
        return GivenWeights(given, self._blocks)


def random(*shape: int) -> F32:
    values: F32 = np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape, np.float32)
    return values


def blocks(rows: int, columns: int, kind: BlockType) -> Blocks:
    return random_blocks(random(rows, columns) * np.float32(columns**-0.5), kind)


def widened(weight: Blocks) -> F32:
    """Its values as matmuls have them."""
    return rounded(weight.dequantise(), "bf16")


def known(tokens: int | str) -> Sequence[int]:
    return [3, 70] if isinstance(tokens, str) else [tokens]


def lower(e: Emitter, kernels: TritonLayers, run: Sequence[Operation], values: Values) -> None:
    by_kind = dict.fromkeys((Embed, Norm, Linear, GatedLinear), kernels)
    Lowering(by_kind, RenderedKernels(), kernels).lower(e, run, values, [])


@EVERY_PAIR
def test_a_weight_is_rounded_once(kind: BlockType, tokens: int | str, chip: str, launch: Launch) -> None:
    """A row of x that is zero but for a one shows a column of the weight."""
    weight = blocks(72, SPEC.hidden_size, kind)
    given = Given({"w": weight})
    context = context_of(SPEC, chip, replace(OPTIONS, device=f"hip:{chip}"))

    def body(e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
        layers = TritonLayers(replace(context, weights=given.weights(tensors)))
        return [layers.linear(e, tensors["x"], "w")]

    inputs: Inputs = {"x": ("bf16", (tokens, SPEC.hidden_size)), **given.inputs}
    program = launch(inputs, body, context)
    for count in known(tokens):
        columns = np.random.default_rng(count).permutation(SPEC.hidden_size)[:count]
        (y,) = program(x=np.eye(SPEC.hidden_size)[columns], **given.arguments)
        np.testing.assert_array_equal(y, widened(weight).T[columns])


@pytest.mark.parametrize(
    ("kind", "features"),
    [
        *((kind, 512) for kind in (MXFP4, *GROUPED)),
        *((BlockType(4, has_minima=True, group=group), 576) for group in (96, 576)),  # no power of two
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, "tokens"])
def test_other_types_of_blocks(
    kind: BlockType, features: int, tokens: int | str, chip: str, launch: Launch
) -> None:
    """In a matmul, and of 8 bits in an embedding."""
    spec = replace(SPEC, hidden_size=features, vocab_size=72)
    weight = blocks(72, features, kind)
    given = Given({"w": weight})
    context = context_of(spec, chip, replace(OPTIONS, device=f"hip:{chip}"))

    def body(e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
        layers = TritonLayers(replace(context, weights=given.weights(tensors)))
        embedded = [layers.embed(e, tensors["ids"], "w")] if kind.bits == 8 else []
        return [layers.linear(e, tensors["x"], "w"), *embedded]

    inputs: Inputs = {"x": ("bf16", (tokens, features)), "ids": ("i64", (tokens,)), **given.inputs}
    program = launch(inputs, body, context)
    for count in known(tokens):
        x, ids = rounded(random(count, features), "bf16"), np.arange(count)
        y, *rows = program(x=x, ids=ids, **given.arguments)
        np.testing.assert_allclose(y, x @ widened(weight).T, rtol=0, atol=TOLERANCE)
        for found in rows:
            np.testing.assert_allclose(found, weight.dequantise()[ids], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [Q4_1, BlockType(8, 16, group=256)], ids=str)
@pytest.mark.parametrize("features", [512, 768])  # whole steps of 512 elements, or not
def test_waves_that_divide_k_add_in_one_order(
    kind: BlockType, features: int, chip: str, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four parts of K, tiles of other sizes have the same bits."""
    spec, weight = replace(SPEC, hidden_size=features), blocks(72, features, kind)
    given = Given({"w": weight})
    context = context_of(spec, chip, replace(OPTIONS, device=f"hip:{chip}"))
    x = rounded(random(11, features), "bf16")

    def product(tile: MatmulTile) -> Array:
        only = [Use(sys.maxsize, sys.maxsize, tile)]
        table = replace(tiles_of(context.target), byte_blocks=(), blocks=only)
        monkeypatch.setattr(layers, "tiles_of", lambda _: table)

        def body(e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
            lowered = TritonLayers(replace(context, weights=given.weights(tensors)))
            return [lowered.linear(e, tensors["x"], "w")]

        inputs: Inputs = {"x": ("bf16", (len(x), features)), **given.inputs}
        return launch(inputs, body, context)(x=x, **given.arguments)[0]

    first, second = (
        product(MatmulTile(*sizes, Tuning(4, 2), parts=4)) for sizes in ((8, 16, 1024), (16, 32, 512))
    )
    np.testing.assert_allclose(first, x @ widened(weight).T, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(first, second)


@EVERY_PAIR
def test_a_feed_forward(kind: BlockType, tokens: int | str, chip: str, launch: Launch) -> None:
    """Embedding with norm, gated pair, projection with residual and norm, and head."""
    hidden, ffn, vocab = SPEC.hidden_size, ffn_features(SPEC), SPEC.vocab_size
    table, norm = blocks(vocab, hidden, Q8_0), 1 + 0.1 * random(hidden)
    gate_up, down = blocks(2 * ffn, hidden, kind), blocks(hidden, ffn, kind)
    given = Given({"table": table, "norm": norm, "gate_up": gate_up, "down": down})
    run = [
        Embed("ids", "x", "table"),
        Norm("x", "normed", "norm"),
        GatedLinear("normed", "gated", "gate_up", "silu"),
        Linear("gated", "x", "down", residual="x"),
        Norm("x", "normed", "norm"),
        Linear("normed", "logits", "table"),
    ]
    context = context_of(SPEC, chip, replace(OPTIONS, device=f"hip:{chip}"))

    def body(e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
        values = Values({"ids": tensors["ids"]})
        lower(e, TritonLayers(replace(context, weights=given.weights(tensors))), run, values)
        return [values["x"], values["logits"]]

    program = launch({"ids": ("i64", (tokens,)), **given.inputs}, body, context)
    for count in known(tokens):
        ids = np.random.default_rng(count).integers(-1, vocab + 2, count)
        x = table.dequantise()[np.where((ids < 0) | (ids >= vocab), vocab - 1, ids)]
        got_x, logits = program(ids=ids, **given.arguments)
        gate, up = np.split(normed(x, norm) @ widened(gate_up).T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ widened(down).T
        np.testing.assert_allclose(got_x, x, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(logits, normed(x, norm) @ widened(table).T, rtol=0, atol=TOLERANCE)


def normed(x: F32, weight: F32) -> F32:
    result: F32 = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + SPEC.rms_norm_eps) * weight
    return result


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("tokens", [1, "tokens"])
def test_keys_and_values(kind: BlockType, tokens: int | str, chip: str, launch: Launch) -> None:
    """They are found in the cache of a token each, with their tokens' rotations."""
    kv = SPEC.attention.kv_features
    weight = blocks(SPEC.attention.qkv_features, SPEC.hidden_size, kind)
    given = Given({"w": weight})
    cache_shape = (PAGES, len(SPEC.layers) * 2 * STRIDE * kv)
    inputs: Inputs = {
        "x": ("bf16", (tokens, SPEC.hidden_size)),
        "rotary": ("f32", (tokens, 2, SPEC.attention.head_dim // 2)),
        "slots": ("i64", (tokens,)),
        "cache": ("f32", cache_shape),
        **dict.fromkeys(("starts", "seq_lens"), ("i64", (tokens,))),
        "blocks": ("i64", (tokens, 1)),
        **given.inputs,
    }
    run = [Linear("x", "qkv", "w"), Attend("qkv", "out", LAYER, SPEC.attention)]
    context = context_of(SPEC, chip, replace(OPTIONS, device=f"hip:{chip}"))

    def body(e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
        count = tensors["x"].shape[0]
        slab = Slab(
            pool="whole",
            layers=range(len(SPEC.layers)),
            blocks=tensors["blocks"],
            cache=tensors["cache"],
            slots=tensors["slots"],
        )
        batch = Batch(
            rows=count,
            tokens=count,
            chunk=1,
            whole_pages=False,
            **{name: tensors[name] for name in ("starts", "seq_lens")},
            slabs=[slab],
        )
        batch.rotaries = {SPEC.attention.rotation: tensors["rotary"]}
        batch.counters = e.fill("0", (count, SPEC.attention.kv_heads), "i32")
        values = Values({"x": tensors["x"]}, batch)
        lower(e, TritonLayers(replace(context, weights=given.weights(tensors))), run, values)
        return [values["out"], batch.cache]

    program = launch(inputs, body, context)
    for count in known(tokens):
        x, angles = (
            rounded(random(count, SPEC.hidden_size), "bf16"),
            random(count, SPEC.attention.head_dim // 2),
        )
        ids = np.random.default_rng(count).permutation(PAGES)[:count]
        out, cache = program(
            x=x,
            rotary=np.stack([np.cos(angles), np.sin(angles)], axis=1),
            slots=ids * len(SPEC.layers) * 2 * STRIDE,
            cache=np.zeros(cache_shape),
            starts=np.zeros(count),
            seq_lens=np.ones(count),
            blocks=ids[:, None],
            **given.arguments,
        )
        heads = (x @ widened(weight).T).reshape(count, -1, SPEC.attention.head_dim)
        _, k, v = np.split(heads, [4, 6], axis=1)
        got = cache.reshape(PAGES, len(SPEC.layers), 2, STRIDE, 2, SPEC.attention.head_dim)[ids, LAYER, :, 0]
        np.testing.assert_allclose(got[:, 0], turned(k, angles), rtol=0, atol=1e-4)
        np.testing.assert_allclose(got[:, 1], v, rtol=0, atol=1e-4)
        # A token that sees itself alone gets its own value.
        np.testing.assert_allclose(out, np.repeat(v, 2, axis=1).reshape(count, -1), rtol=0, atol=2e-2)


def turned(heads: F32, angles: F32) -> F32:
    """[tokens, heads, head_dim], the halves of each rotated against each other."""
    low, high = np.split(heads, 2, axis=2)
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=2)
