"""Attention in bf16, on AMX and on AVX-512: rope_store and attention together, over pages, against numpy.

Every page table is NaN at first, and pages come in random order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.builder.graph.batch import Batch, Slab
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor, tensor_type
from shortfin_apps.llm.builder.graph.rotary import Rotary, rotary_frequencies
from shortfin_apps.llm.builder.graph.token_layout import lay_out
from shortfin_apps.llm.builder.lowering.avx512.attention import Bf16Attention
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, RenderedKernels
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.layout import RowMajor
from shortfin_apps.llm.model.kv_layout import KVType
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec
from tests.builder.compiled_kernels import ConstantWeights, cpu_or_skip, load
from tests.builder.compiled_model import PAGES, TINY, block_table
from tests.builder.specs import attend_of, changed, page_elements, sinks_of
from tests.matrices import slow_but

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
Bits = npt.NDArray[Any]  # i16 or i8

LAYER = 1  # of TINY's two
NAN = -1  # every bit set: NaN as bf16 and as the scale of bytes
DECODE_ROWS = (1, 5)


@dataclass(frozen=True)
class Shape:
    head_dim: int
    group: int
    stride: int
    window: int | None = None
    score_cap: float | None = None
    kv: KVType = "bf16"
    has_sinks: bool = False

    @property
    def spec(self) -> ModelSpec:
        return changed(
            TINY,
            {
                "kv_heads": 2,
                "heads": 2 * self.group,
                "head_dim": self.head_dim,
                "cap": self.score_cap,
                "sinks": self.has_sinks,
            },
            at={LAYER: {"window": self.window}},
        )

    def __str__(self) -> str:
        window, cap = f"-window{self.window}" * bool(self.window), "-capped" * bool(self.score_cap)
        sinks = "-sinks" * self.has_sinks
        return f"{self.head_dim}x{self.group}-{self.stride}{window}{cap}{sinks}-{self.kv}"

    @property
    def bits(self) -> str:
        """The integers of as many bits as an element of the cache has."""
        return "i8" if self.kv == "q8_0" else "i16"


# 20 heads and 16 tokens are more than a tile holds; pages of 48 slots leave half a tile of V, 32 none.
# Windows begin within a page, which may be the last, and within a step.
SHAPES = [
    *(Shape(64, 3, 16), Shape(32, 1, 32), Shape(128, 8, 16), Shape(96, 20, 48)),
    *(Shape(64, 3, 16, window=37), Shape(32, 2, 48, window=19, score_cap=3.0)),
    *(Shape(64, 3, 16, kv="q8_0"), Shape(256, 4, 32, kv="q8_0"), Shape(32, 1, 48, window=37, kv="q8_0")),
    *(Shape(64, 8, 16, window=37, has_sinks=True), Shape(32, 20, 32, kv="q8_0", has_sinks=True)),
]

# With a window of its own, and in bytes.
QUICK = [("avx512", SHAPES[3]), ("avx512", SHAPES[5]), ("avx512", SHAPES[6])]


@dataclass(frozen=True)
class Kernels:
    shape: Shape
    options: BuildOptions
    module: Any

    def empty(self) -> Bits:
        dtype = np.int8 if self.shape.bits == "i8" else np.int16
        return np.full((PAGES, page_elements(self.shape.spec, self.options)), NAN, dtype)

    def extend(self, cache: Bits, qkv: F32, *geometry: I64) -> tuple[F32, Any]:
        """`geometry`: offsets, starts, seq_lens, blocks."""
        out, written = self.module.extend(qkv, *geometry, cache)
        return out.to_host(), written.to_host()

    def prefill(self, cache: Bits, qkv: F32, *geometry: I64) -> tuple[F32, Any]:
        """One row of whole pages; `geometry`: starts, seq_lens, blocks."""
        padded = np.zeros((-len(qkv) % self.shape.stride + len(qkv), qkv.shape[1]), np.float32)
        padded[: len(qkv)] = qkv
        out, written = self.module.prefill(padded, *geometry, cache)
        return out.to_host()[: len(qkv)], written.to_host()

    def decode(self, cache: Bits, qkv: F32, *geometry: I64) -> tuple[F32, Any]:
        """A row of one token each; `geometry`: starts, seq_lens, blocks."""
        out, written = self.module[f"decode_{len(qkv)}"](qkv, *geometry, cache)
        return out.to_host(), written.to_host()


def as_type(e: Emitter, x: Tensor, dtype: str) -> Tensor:
    """The same bits."""
    if x.dtype == dtype:
        return x
    cast = Tensor(e.fresh(), x.shape, dtype)
    e.line(f"{cast.name} = flow.tensor.bitcast {x.name} : {x.sized_type} -> {cast.sized_type}")
    return cast


def entry(
    name: str,
    shape: Shape,
    options: BuildOptions,
    target: Target,
    kernels: RenderedKernels,
    decodes: int | None = None,
) -> str:
    """Qkv [tokens, features], i64 geometry, the cache's bits -> attention f32, the cache's new bits.

    With as many rows as it `decodes`, if it does.
    """
    spec = shape.spec
    elements = page_elements(spec, options)
    types = {
        "qkv": tensor_type((decodes or "?", spec.attention.qkv_features), "f32"),
        **({"offsets": "tensor<?xi64>"} if name == "extend" else {}),
        "starts": tensor_type((decodes or "?",), "i64"),
        "seq_lens": tensor_type((decodes or "?",), "i64"),
        "blocks": tensor_type((decodes or "?", "?"), "i64"),
        "cache": tensor_type(("?", elements), shape.bits),
    }
    e = Emitter()

    def dim(argument: str, axis: int) -> str:
        return e.value(f"tensor.dim %{argument}, {e.constant(axis)} : {types[argument]}")

    tokens: Dim = decodes or dim("qkv", 0)
    rows: Dim = decodes or dim("starts", 0)
    width, pages = dim("blocks", 1), dim("cache", 0)
    starts, seq_lens = (Tensor(f"%{argument}", (rows,), "i64") for argument in ("starts", "seq_lens"))
    is_packed = name == "extend"
    cache = as_type(e, Tensor("%cache", (pages, elements), shape.bits), options.cache_dtype)
    batch = Batch(
        rows=rows,
        tokens=tokens,
        chunk=1 if decodes else None if is_packed else tokens,
        whole_pages=name == "prefill",
        starts=starts,
        seq_lens=seq_lens,
        slabs=[
            Slab(
                pool="whole",
                layers=range(len(spec.layers)),
                blocks=Tensor("%blocks", (rows, width), "i64"),
                cache=cache,
            )
        ],
        given_offsets=Tensor("%offsets", (rows,), "i64") if is_packed else None,
    )
    batch.rotation = spec.attention.rotation
    lay_out(e, batch, {spec.attention.rotation: Rotary(spec.attention.rotation, 512)})

    qkv = Tensor("%qkv", (tokens, spec.attention.qkv_features), "f32")
    context = LoweringContext(spec, options, target, make_weights(spec), kernels)
    narrow = Bf16Attention(context).attend(e, attend_of(spec, LAYER), qkv, batch)
    body = "  %wide = arith.extf %a : bf16 to f32\n  linalg.yield %wide : f32"
    out = e.elementwise("td", ("td", narrow.shape, "f32"), [(narrow, "td")], body)
    written = as_type(e, batch.cache, shape.bits)
    lines = "\n".join(e.lines)
    arguments = ", ".join(f"%{argument}: {kind}" for argument, kind in types.items())
    return (
        f"func.func @{name}({arguments}) -> ({out.type}, {written.type}) {{\n{lines}\n"
        f"return {out.name}, {written.name} : {out.type}, {written.type}\n}}"
    )


@pytest.fixture(
    scope="module",
    params=slow_but(QUICK, [(cpu, shape) for cpu in ("amx", "avx512") for shape in SHAPES]),
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    shape: Shape = request.param[1]
    target = cpu_or_skip(request.param[0])
    options = BuildOptions(block_seq_stride=shape.stride, kv=shape.kv)
    rendered = RenderedKernels()
    functions = [entry(name, shape, options, target, rendered) for name in ("extend", "prefill")]
    functions += [entry(f"decode_{rows}", shape, options, target, rendered, rows) for rows in DECODE_ROWS]
    parts = [
        *Rotary(shape.spec.attention.rotation, 512).declarations(),
        *make_weights(shape.spec).declarations(),
        *rendered.texts.values(),
        *functions,
    ]
    text = "\n".join(["module @kernels {", *parts, "}"])
    return Kernels(shape, options, load(text, tmp_path_factory.mktemp("attention")))


def bf16(x: npt.NDArray[Any]) -> F32:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def kept(shape: Shape, x: npt.NDArray[Any]) -> F32:
    """Heads [..., head_dim] as the cache keeps them, and attention reads them."""
    if shape.kv == "bf16":
        return bf16(x)
    scales = np.abs(x).max(axis=-1, keepdims=True) / 127
    return bf16(np.rint(x / scales) * scales)


def make_weights(spec: ModelSpec) -> ConstantWeights:
    """Sinks, if the model has any: a head's may exceed all scores, or be far below."""
    if (name := sinks_of(spec, LAYER)) is None:
        return ConstantWeights({}, {})
    sinks = np.linspace(-24, 12, spec.attention.heads, dtype=np.float32)
    return ConstantWeights({name: sinks}, {name: RowMajor("f32")})


def sunk(shape: Shape, peaks: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | int:
    """The sinks' part of the weights' sum, for scores that are powers of two, less `peaks` [heads, ...]."""
    name = sinks_of(shape.spec, LAYER)
    if name is None:
        return 0
    sinks = make_weights(shape.spec).values[name].astype(np.float64)
    powers: npt.NDArray[np.float64] = np.exp2(sinks[:, None, None] * np.log2(np.e) - peaks)
    return powers


def expected(shape: Shape, qkv: F32) -> F32:
    """Attention [tokens, heads * head_dim] of a whole sequence; q, k and v are rounded as they are kept."""
    spec, count, half = shape.spec, len(qkv), shape.head_dim // 2
    heads, kv_heads = spec.attention.heads, spec.attention.kv_heads
    angles = np.arange(count)[:, None, None] * rotary_frequencies(
        spec.attention.rotation, spec.max_position_embeddings
    )
    cos, sin = np.cos(angles), np.sin(angles)

    def rotate(x: F32) -> npt.NDArray[np.float64]:
        lo, hi = x[..., :half], x[..., half:]
        return np.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], axis=-1)

    q, k, v = np.split(qkv.reshape(count, -1, shape.head_dim), [heads, heads + kv_heads], axis=1)
    scale = (np.log2(np.e) if shape.score_cap is None else 1 / shape.score_cap) / shape.head_dim**0.5
    keys, values = (np.repeat(kept(shape, x), shape.group, axis=1) for x in (rotate(k), v))
    scores = np.einsum("qhd,khd->hqk", bf16(rotate(q) * scale), keys)
    if shape.score_cap is not None:
        scores = np.log2(np.e) * shape.score_cap * np.tanh(scores)
    is_seen = np.tri(count, dtype=bool) & ~np.tri(count, k=-(shape.window or count), dtype=bool)
    scores = np.where(is_seen, scores, -np.inf)
    peaks = scores.max(axis=-1, keepdims=True)
    weights = np.exp2(scores - peaks)
    weights /= weights.sum(axis=-1, keepdims=True) + sunk(shape, peaks)
    out: F32 = np.einsum("hqk,khd->qhd", weights, values).reshape(count, -1)
    return out


def random_qkv(shape: Shape, rng: np.random.Generator, count: int) -> F32:
    """Queries so long that maxima move and weights concentrate."""
    qkv = rng.standard_normal((count, shape.spec.attention.qkv_features)).astype(np.float32)
    qkv[:, : shape.spec.attention.heads * shape.head_dim] *= 4
    return qkv


def pages_for(shape: Shape, count: int) -> int:
    return -(-count // shape.stride)


def check(actual: F32, reference: F32) -> None:
    """Weights and results have 8 bits each, and values a standard deviation of 1."""
    np.testing.assert_allclose(actual, reference, rtol=0, atol=0.03)


SLOW_FIXTURE = [HealthCheck.function_scoped_fixture]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, int]:
    """(in the cache, in all): a decode anywhere, or a chunk from some page on, in thirds of the way."""
    length = draw(st.integers(1, 130))
    return (length - 1 if draw(st.booleans()) else draw(st.integers(0, 3)) * length // 4, length)


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW_FIXTURE)
@given(
    cuts=st.lists(sequences(), min_size=1, max_size=4), padding=st.integers(0, 20), seed=st.integers(0, 99)
)
def test_any_mix_agrees_with_numpy(
    kernels: Kernels, cuts: list[tuple[int, int]], padding: int, seed: int
) -> None:
    shape, rng = kernels.shape, np.random.default_rng(seed)
    # A chunk begins where a page does.
    cuts = [(a if b - a == 1 else a // shape.stride * shape.stride, b) for a, b in cuts]
    wholes = [random_qkv(shape, rng, length) for _, length in cuts]
    pages = [pages_for(shape, length) for _, length in cuts]
    blocks = block_table(rng, pages, max(pages) + 1)
    cache = kernels.empty()
    for row, ((start, _), qkv) in enumerate(zip(cuts, wholes, strict=True)):
        if start:
            _, cache = kernels.prefill(
                cache, qkv[:start], np.array([0]), np.array([start]), blocks[row : row + 1]
            )
    parts = [qkv[start:] for (start, _), qkv in zip(cuts, wholes, strict=True)]
    packed = np.concatenate(
        [*parts, np.full((padding, shape.spec.attention.qkv_features), np.nan, np.float32)]
    )
    offsets = np.cumsum([0, *map(len, parts)])[:-1]
    starts, seq_lens = (np.array(numbers) for numbers in zip(*cuts, strict=True))
    out, after = kernels.extend(cache, packed, offsets, starts, seq_lens, blocks)
    for offset, (start, length), qkv in zip(offsets, cuts, wholes, strict=True):
        check(out[offset : offset + length - start], expected(shape, qkv)[start:])
    np.testing.assert_array_equal(out[len(packed) - padding :], 0)
    assert set(np.flatnonzero((after != cache).any(axis=1))) <= set(blocks.flat)


def test_a_token_has_the_same_bits_in_any_chunk(kernels: Kernels) -> None:
    shape, rng = kernels.shape, np.random.default_rng(5)
    count = 2 * max(shape.stride, 32) + 21
    qkv = random_qkv(shape, rng, count)
    tables = block_table(rng, [pages_for(shape, count)] * 3, pages_for(shape, count))
    zero, all_of_it = np.array([0]), np.array([count])
    whole, _ = kernels.prefill(kernels.empty(), qkv, zero, all_of_it, tables[:1])
    extended, _ = kernels.extend(kernels.empty(), qkv, zero, zero, all_of_it, tables[:1])
    np.testing.assert_array_equal(extended, whole)
    cache = kernels.empty()
    for start in range(0, count, shape.stride):
        end = min(count, start + shape.stride)
        chunk, cache = kernels.prefill(cache, qkv[start:end], np.array([start]), np.array([end]), tables[1:2])
        np.testing.assert_array_equal(chunk, whole[start:end])
    cache = kernels.empty()
    for token in range(count):
        blocks = np.concatenate([tables[2:], tables[2:] * 0])
        decoded, cache = kernels.extend(
            cache,
            np.stack([qkv[token], qkv[0] * np.nan]),
            np.array([0, 1]),
            np.array([token, 0]),
            np.array([token + 1, 0]),
            blocks,
        )
        np.testing.assert_array_equal(decoded[0], whole[token])


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW_FIXTURE)
@given(
    positions=st.lists(st.integers(0, 110) | st.none(), min_size=5, max_size=5),
    spare=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_a_decode_agrees_with_numpy_and_to_the_bit_with_an_extend(
    kernels: Kernels, positions: list[int | None], spare: int, seed: int
) -> None:
    """Rows at any position, or padding (None)."""
    shape, rng = kernels.shape, np.random.default_rng(seed)
    lengths = [0 if position is None else position + 1 for position in positions]
    pages = [pages_for(shape, length) for length in lengths]
    blocks = block_table(rng, pages, max(pages) + 1 + spare)
    wholes = [random_qkv(shape, rng, length) for length in lengths]
    cache = kernels.empty()
    for row, qkv in enumerate(wholes):
        if len(qkv) > 1:
            start, end = np.array([0]), np.array([len(qkv) - 1])
            _, cache = kernels.prefill(cache, qkv[:-1], start, end, blocks[row : row + 1])
    padding = np.full((1, shape.spec.attention.qkv_features), np.nan, np.float32)
    last = np.concatenate([qkv[-1:] if len(qkv) else padding for qkv in wholes])
    seq_lens = np.array(lengths)
    starts = np.maximum(seq_lens - 1, 0)
    together, after = kernels.decode(cache, last, starts, seq_lens, blocks)
    extended, after_extend = kernels.extend(cache, last, np.arange(5), starts, seq_lens, blocks)
    np.testing.assert_array_equal(together, extended)
    np.testing.assert_array_equal(after, after_extend)
    for row, qkv in enumerate(wholes):
        table = slice(row, row + 1)
        alone, _ = kernels.decode(cache, last[table], starts[table], seq_lens[table], blocks[table])
        np.testing.assert_array_equal(alone[0], together[row])
        check(together[row], expected(shape, qkv)[-1] if len(qkv) else np.zeros_like(together[row]))


@settings(max_examples=10, deadline=None, suppress_health_check=SLOW_FIXTURE)
@given(cut=sequences(), seed=st.integers(0, 99))
def test_what_was_kept_before_the_window_does_not_matter(
    kernels: Kernels, cut: tuple[int, int], seed: int
) -> None:
    """Pages there may have been given to another row since."""
    shape, rng = kernels.shape, np.random.default_rng(seed)
    length = cut[1]
    start = length - 1 if length - cut[0] == 1 else cut[0] // shape.stride * shape.stride
    qkv = random_qkv(shape, rng, length)
    gone = qkv.copy()
    gone[: max(0, start + 1 - (shape.window or length))] = np.nan
    count = pages_for(shape, length)
    blocks = block_table(rng, [count], count)
    results = []
    for tokens in (qkv, gone):
        cache = kernels.empty()
        if start:
            _, cache = kernels.prefill(cache, tokens[:start], np.array([0]), np.array([start]), blocks)
        zero, starts, seq_lens = np.array([0]), np.array([start]), np.array([length])
        results.append(kernels.extend(cache, qkv[start:], zero, starts, seq_lens, blocks)[0])
    np.testing.assert_array_equal(results[1], results[0])
