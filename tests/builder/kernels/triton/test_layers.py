"""The kernels between two attentions, against numpy, with the tiles of every number of tokens."""

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
from shortfin_apps.llm.builder.lowering.lowering import Lowering, LoweringContext, RenderedKernels, Values
from shortfin_apps.llm.model.attention import Attend, NormHeads
from shortfin_apps.llm.model.operations import AddBias, Embed, GatedLinear, Linear, Norm, Operation
from shortfin_apps.llm.model.spec import BuildOptions, FloatType
from tests.builder.compiled_model import TINY
from tests.builder.kernels.triton.conftest import Launch, context_of
from tests.builder.kernels.triton.given_weights import GivenWeights
from tests.builder.kernels.triton.launched import Inputs, rounded
from tests.builder.specs import ffn_features
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.lowering.triton import layers as triton_layers
from shortfin_apps.llm.builder.lowering.triton.layers import TritonLayers
from shortfin_apps.llm.builder.lowering.triton.tiles import MatmulTile, Use, tiles_of
from tests.builder.specs import changed

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(300)]

F32 = npt.NDArray[np.float32]
TOLERANCES: dict[str, float] = {"f32": 1e-4, "f16": 2e-2, "bf16": 8e-2}
# Sizes that no tile divides.
SPEC = changed(TINY, {"hidden_size": 80, "features": 120, "vocab_size": 70})
FFN, DOWN, NORM, TABLE = "blk.0.ffn_gate_up.weight", "blk.0.ffn_down.weight", "blk.0.ffn_norm.weight", "table"
TOKENS = [1, 3, 16, 17, 40, 70]
TILED: list[int | str] = [
    1,
    16,
    30,
    50,
    "tokens",
]  # numbers of tokens that are known, or not, when the kernel is compiled


def normed(x: F32, weight: F32) -> F32:
    result: F32 = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + SPEC.rms_norm_eps) * weight
    return result


def silu(x: F32) -> F32:
    result: F32 = x / (1 + np.exp(-x))
    return result


def options(chip: str, dtype: FloatType) -> BuildOptions:
    return BuildOptions(device=f"hip:{chip}", weights=dtype, kv=dtype)


def random(*shape: int, scale: float = 1.0) -> F32:
    values: F32 = np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape, np.float32) * scale
    return values


def layers(context: LoweringContext, tensors: Mapping[str, Tensor]) -> TritonLayers:
    return TritonLayers(replace(context, weights=GivenWeights(tensors)))


def known(tokens: int | str) -> list[int]:
    return TOKENS if isinstance(tokens, str) else [tokens]


@pytest.mark.parametrize(
    ("dtype", "tokens"), [("f32", "tokens"), ("f16", "tokens"), *(("bf16", tokens) for tokens in TILED)]
)
def test_a_feed_forward(dtype: FloatType, tokens: int | str, chip: str, launch: Launch) -> None:
    """Embedding with norm, gated pair, projection with residual and norm, and again: all but attention."""
    hidden, ffn, vocab = SPEC.hidden_size, ffn_features(SPEC), SPEC.vocab_size
    inputs: Inputs = {
        "ids": ("i64", (tokens,)),
        TABLE: (dtype, (vocab, hidden)),
        NORM: ("f32", (hidden,)),
        FFN: (dtype, (2 * ffn, hidden)),
        DOWN: (dtype, (hidden, ffn)),
    }
    arguments = {name: name.replace(".", "_") for name in inputs}
    run = [
        Embed("ids", "x", TABLE),
        Norm("x", "normed", NORM),
        GatedLinear("normed", "gated", FFN, "silu"),
        Linear("gated", "x", DOWN, residual="x"),
        Norm("x", "normed", NORM),
        GatedLinear("normed", "gated", FFN, "silu"),
        Linear("gated", "y", DOWN),
    ]
    context = context_of(SPEC, chip, options(chip, dtype))

    def body(e: Emitter, given: dict[str, Tensor]) -> list[Tensor]:
        tensors = {name: given[arguments[name]] for name in inputs}
        values = Values({"ids": tensors["ids"]})
        lower(e, layers(context, tensors), run, values)
        return [values["x"], values["y"]]

    program = launch({arguments[name]: kind for name, kind in inputs.items()}, body, context)
    table, norm = rounded(random(vocab, hidden), dtype), 1 + 0.1 * random(hidden)
    gate_up = rounded(random(2 * ffn, hidden, scale=hidden**-0.5), dtype)
    down = rounded(random(hidden, ffn, scale=ffn**-0.5), dtype)
    weights = {TABLE: table, NORM: norm, FFN: gate_up, DOWN: down}
    given = {arguments[name]: value for name, value in weights.items()}
    for count in known(tokens):
        ids = np.random.default_rng(count).integers(-1, vocab + 2, count)
        x = table[np.where((ids < 0) | (ids >= vocab), vocab - 1, ids)]
        got_x, got_y = program(ids=ids, **given)
        for _ in range(2):
            both = normed(x, norm) @ gate_up.T
            y = (silu(both[:, :ffn]) * both[:, ffn:]) @ down.T
            last, x = x, x + y
        np.testing.assert_allclose(got_x, last, rtol=0, atol=TOLERANCES[dtype])
        np.testing.assert_allclose(got_y, y, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("features", [256, 320])  # whole steps of 256 elements, or not
def test_waves_that_divide_k_add_in_one_order(
    features: int, chip: str, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four parts of K, as Hopper's tiles have, tiles of other sizes have the same bits."""
    context = context_of(SPEC, chip, options(chip, "bf16"))
    x, weight = (rounded(random(count, features), "bf16") for count in (11, 72))

    def product(tile: MatmulTile) -> F32:
        table = replace(tiles_of(context.target), matmuls=[Use(sys.maxsize, sys.maxsize, tile)])
        monkeypatch.setattr(triton_layers, "tiles_of", lambda _: table)

        def body(e: Emitter, given: dict[str, Tensor]) -> list[Tensor]:
            return [layers(context, {DOWN: given["weight"]}).linear(e, given["x"], DOWN)]

        inputs: Inputs = {"x": ("bf16", x.shape), "weight": ("bf16", weight.shape)}
        result: F32 = launch(inputs, body, context)(x=x, weight=weight)[0]
        return result

    first, second = (
        product(MatmulTile(*sizes, Tuning(4, 2), parts=4)) for sizes in ((8, 16, 1024), (16, 32, 512))
    )
    np.testing.assert_allclose(first, x @ weight.T, rtol=0, atol=TOLERANCES["bf16"])
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f16"])
def test_a_row_is_the_same_in_every_tile(dtype: FloatType, chip: str, launch: Launch) -> None:
    """All sums are in one order: a row's bits do not depend on how many rows are beside it."""
    hidden, ffn, vocab = SPEC.hidden_size, ffn_features(SPEC), SPEC.vocab_size
    weights: Inputs = {
        "table": (dtype, (vocab, hidden)),
        "norm": ("f32", (hidden,)),
        "gate_up": (dtype, (2 * ffn, hidden)),
        "down": (dtype, (hidden, ffn)),
    }
    sizes: list[int | str] = [1, 30, 50, "tokens"]
    ids: Inputs = {f"ids_{tokens}": ("i64", (tokens,)) for tokens in sizes}
    context = context_of(SPEC, chip, options(chip, dtype))
    run = [
        Embed("ids", "x", "table"),
        Norm("x", "normed", "norm"),
        GatedLinear("normed", "gated", "gate_up", "silu"),
        Linear("gated", "x", "down", residual="x"),
        Norm("x", "normed", "norm"),
        Linear("normed", "out", "gate_up"),
    ]

    def body(e: Emitter, given: dict[str, Tensor]) -> list[Tensor]:
        results = []
        for name in ids:
            values = Values({"ids": given[name]})
            lower(e, layers(context, given), run, values)
            results.append(values["out"])
        return results

    program = launch({**ids, **weights}, body, context)
    rng = np.random.default_rng(3)
    counts = [known(tokens)[-1] for tokens in sizes]
    tokens = {name: rng.integers(0, vocab, count) for name, count in zip(ids, counts, strict=True)}
    for each in tokens.values():
        each[-1] = 7
    outs = program(**tokens, **{name: random(*map(int, shape)) for name, (_, shape) in weights.items()})
    for out in outs[1:]:
        np.testing.assert_array_equal(out[-1], outs[0][-1])


def lower(e: Emitter, kernels: TritonLayers, run: Sequence[Operation], values: Values) -> None:
    by_kind = dict.fromkeys((Embed, Norm, Linear, GatedLinear), kernels)
    Lowering(by_kind, RenderedKernels(), kernels).lower(e, run, values, [])


PLAIN, BIASED, NORMED, BOTH = (), (AddBias,), (NormHeads,), (AddBias, NormHeads)


@pytest.mark.parametrize(
    ("between", "head_dim", "tokens"),
    [
        *((PLAIN, 16, tokens) for tokens in TILED),
        (BIASED, 16, "tokens"),
        (NORMED, 40, "tokens"),
        *((BOTH, head_dim, tokens) for head_dim in (16, 40) for tokens in (16, 50)),
    ],
)
def test_queries_keys_and_values(
    between: tuple[type[AddBias | NormHeads], ...],
    head_dim: int,
    tokens: int | str,
    chip: str,
    launch: Launch,
) -> None:
    """Attention of tokens to themselves alone shows q, and v; the cache shows k and v."""
    spec = changed(SPEC, {"heads": 3, "kv_heads": 1, "head_dim": head_dim, "qk_norm": NormHeads in between})
    stride, layer, pages = 16, 1, 90
    features, half = spec.attention.qkv_features, spec.attention.head_dim // 2
    kv = spec.attention.kv_features
    elements = len(spec.layers) * 2 * stride * kv
    inputs: Inputs = {
        "x": ("f32", (tokens, spec.hidden_size)),
        "norm": ("f32", (spec.hidden_size,)),
        "w": ("f32", (features, spec.hidden_size)),
        "bias": ("f32", (features,)),
        "head_norm": ("f32", (2 * head_dim,)),
        "rotary": ("f32", (tokens, 2, half)),
        "slots": ("i64", (tokens,)),
        "cache": ("f32", ("pages", elements)),
        "starts": ("i64", (tokens,)),
        "seq_lens": ("i64", (tokens,)),
        "blocks": ("i64", (tokens, "width")),
    }
    weights: dict[type[Operation], Operation] = {
        AddBias: AddBias("qkv", "qkv", "bias"),
        NormHeads: NormHeads("qkv", "qkv", "head_norm", spec.attention),
    }
    run = [
        Norm("x", "normed", "norm"),
        Linear("normed", "qkv", "w"),
        *(weights[kind] for kind in between),
        Attend("qkv", "out", layer, spec.attention),
    ]
    context = context_of(spec, chip, options(chip, "f32"))

    def body(e: Emitter, given: dict[str, Tensor]) -> list[Tensor]:
        count = given["x"].shape[0]
        batch = Batch(
            rows=count,
            tokens=count,
            chunk=1,
            whole_pages=False,
            **{name: given[name] for name in ("starts", "seq_lens")},
            slabs=[
                Slab(
                    pool="whole",
                    layers=range(len(spec.layers)),
                    blocks=given["blocks"],
                    cache=given["cache"],
                    slots=given["slots"],
                )
            ],
        )
        batch.rotaries = {spec.attention.rotation: given["rotary"]}
        batch.counters = e.fill("0", (count, spec.attention.kv_heads), "i32")
        values = Values({"x": given["x"]}, batch)
        lower(e, layers(context, given), run, values)
        return [values["out"], batch.cache]

    program = launch(inputs, body, context)
    norm, w, bias = 1 + 0.1 * random(spec.hidden_size), random(features, spec.hidden_size), random(features)
    head_norm = 1 + 0.3 * random(2 * head_dim)
    for count in known(tokens):
        x = random(count, spec.hidden_size)
        angles = random(count, half)
        rotary = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        cache = random(pages, elements)
        ids = np.random.default_rng(count).permutation(pages)[:count]
        qkv = normed(x, norm) @ w.T + (bias if AddBias in between else 0)
        heads = qkv.reshape(count, -1, spec.attention.head_dim)
        if NormHeads in between:
            own = np.repeat(head_norm.reshape(2, -1), [3, 1], axis=0)
            heads[:, :4] = normed(heads[:, :4], own)
        q, k, v = np.split(heads, [3, 4], axis=1)
        turned_q, turned_k = turn(q, rotary), turn(k, rotary)
        expected = cache.reshape(pages, len(spec.layers), 2, stride, kv).copy()
        expected[ids, layer, 0, 0], expected[ids, layer, 1, 0] = turned_k[:, 0], v[:, 0]
        expected[ids, layer, 0, 1], expected[ids, layer, 1, 1] = 0, 0
        given_cache = cache.reshape(expected.shape).copy()
        given_cache[ids, layer, :, 1] = 0
        # Position 1, of which the key and the value are zero, weighs 1 against e^(q k).
        weight = 1 / (
            1 + np.exp(-np.einsum("thd,td->th", turned_q, turned_k[:, 0]) / np.sqrt(spec.attention.head_dim))
        )
        out, got = program(
            x=x,
            norm=norm,
            w=w,
            bias=bias,
            head_norm=head_norm,
            rotary=rotary,
            slots=ids * len(spec.layers) * 2 * stride,
            cache=given_cache.reshape(pages, elements),
            starts=np.ones(count),
            seq_lens=np.full(count, 2),
            blocks=ids[:, None],
        )
        np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=0, atol=1e-3)
        seen = (weight[:, :, None] * v).reshape(count, -1)
        np.testing.assert_allclose(out, seen, rtol=0, atol=1e-3)


def turn(heads: F32, rotary: F32) -> F32:
    """[tokens, heads, head_dim], the halves of each rotated against each other."""
    low, high = np.split(heads, 2, axis=2)
    cosine, sine = rotary[:, None, 0], rotary[:, None, 1]
    return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=2)
