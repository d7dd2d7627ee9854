"""Attention over pages against numpy: rows of any length, as a prefill, packed, and as a decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.batch import Batch, Slab
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.model.attention import dequantised_heads, quantised_heads
from shortfin_apps.llm.model.spec import BuildOptions, FloatType, ModelSpec
from tests.builder.cached_rows import rows_in_bytes
from tests.builder.compiled_model import TINY
from tests.builder.kernels.triton.conftest import Launch, context_of
from tests.builder.kernels.triton.given_weights import GivenWeights
from tests.builder.kernels.triton.launched import Array, Inputs, rounded
from tests.builder.specs import attend_of, page_elements, windows_of
from tests.hip import CHIPS
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.lowering.triton.attention import TritonAttention
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher
from shortfin_apps.llm.builder.lowering.triton.operands import MatmulOperands
from shortfin_apps.llm.builder.lowering.triton.tiles import MOST_SPLITS, tiles_of
from tests.builder.specs import changed

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(300)]

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
LAYER = 1
SINKS = np.array([-200.0, 0.5, 3.0, 200.0], np.float32)  # of no weight to all of it
TOLERANCES: dict[FloatType, float] = {"f32": 1e-4, "f16": 2e-2, "bf16": 5e-2}
SPECS = {
    "shared": TINY,
    "smollm2": changed(TINY, {"heads": 9, "kv_heads": 3, "head_dim": 64}),
    "long": replace(
        changed(TINY, {"heads": 9, "kv_heads": 3, "head_dim": 64}), max_position_embeddings=16384
    ),
    "not-a-power-of-two": changed(TINY, {"heads": 4, "kv_heads": 4, "head_dim": 80}),
    "window": changed(TINY, at={1: {"window": 37}}),
    "wide-window": changed(TINY, {"cap": 2.0}, at={1: {"window": 300}}),
    "sinks": changed(TINY, {"sinks": True}, at={1: {"window": 37}}),
    "many-share": changed(TINY, {"heads": 24, "kv_heads": 1, "head_dim": 16}),
}


@dataclass(frozen=True)
class Rows:
    """A batch: the tokens that each row has in it, and those before them; then padding."""

    starts: Sequence[int]
    lengths: Sequence[int]
    stride: int = 16
    chunk: int | None = None  # tokens of every row, padding included; None where they are packed
    padding: int = 0  # tokens behind packed rows
    padding_rows: Sequence[int] = ()  # how far behind the packed rows' tokens each begins

    @property
    def seq_lens(self) -> list[int]:
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        return [*ends, *(1 for _ in self.padding_rows)]

    @property
    def width(self) -> int:
        return -(-max(self.seq_lens) // self.stride)

    @property
    def offsets(self) -> list[int]:
        lengths = self.lengths if self.chunk is None else [self.chunk] * len(self.lengths)
        *offsets, end = accumulate(lengths, initial=0)
        return [*offsets, *(end + each for each in self.padding_rows)]

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.padding if self.chunk is None else self.chunk * len(self.lengths)

    @property
    def compared(self) -> int:
        """Tokens whose results are known: all tokens but the padding rows'."""
        if self.chunk is not None:
            return self.tokens
        return sum(self.lengths) + min(self.padding_rows, default=self.padding)

    @property
    def arguments(self) -> dict[str, I64]:
        starts = [*self.starts, *(0 for _ in self.padding_rows)]
        named = {"offsets": self.offsets, "starts": starts, "seq_lens": self.seq_lens}
        return {name: np.array(numbers) for name, numbers in named.items()}


def reference(spec: ModelSpec, rows: Rows, given: dict[str, Array]) -> F32:
    """Out [tokens, heads * head_dim] of `arguments`; zeros for padding."""
    q = given["q"].reshape(rows.tokens, -1, spec.attention.head_dim)
    cache = given["cache"].reshape(
        len(given["cache"]), len(spec.layers), 2, rows.stride, -1, spec.attention.head_dim
    )
    out = np.zeros_like(q)
    sharing = spec.attention.heads // spec.attention.kv_heads
    for row, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True)):
        slots = cache[given["blocks"][row], LAYER].swapaxes(0, 1).reshape(2, -1, *cache.shape[4:])
        for i in range(length):
            first = max(start + i + 1 - (windows_of(spec)[LAYER] or start + i + 1), 0)
            keys, values = (np.repeat(plane[first : start + i + 1], sharing, axis=1) for plane in slots)
            token = rows.offsets[row] + i
            scores = np.einsum("hd,nhd->hn", q[token], keys) / np.sqrt(spec.attention.head_dim)
            if spec.attention.cap:
                scores = spec.attention.cap * np.tanh(scores / spec.attention.cap)
            if spec.attention.sinks:
                scores, nothing = np.c_[scores, given["sinks"]], np.zeros((1, *values.shape[1:]))
                values = np.concatenate([values, nothing])
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[token] = np.einsum("hn,nhd->hd", weights / weights.sum(axis=1, keepdims=True), values)
    return out.reshape(given["q"].shape)


def options(chip: str, dtype: FloatType, stride: int) -> BuildOptions:
    return BuildOptions(device=f"hip:{chip}", weights=dtype, kv=dtype, block_seq_stride=stride)


def inputs_of(spec: ModelSpec, dtype: FloatType, stride: int) -> Inputs:
    return {
        "q": (dtype, ("tokens", spec.attention.q_features)),
        "cache": (dtype, ("pages", page_elements(spec, options("gfx942", dtype, stride)))),
        **dict.fromkeys(("offsets", "starts", "seq_lens"), ("i64", ("rows",))),
        "blocks": ("i64", ("rows", "width")),
        **({"sinks": ("f32", (spec.attention.heads,))} if spec.attention.sinks else {}),
    }


def arguments(spec: ModelSpec, dtype: FloatType, rows: Rows) -> dict[str, Array]:
    """Of random numbers, with pages in random order; padding rows have page 0."""
    rng = np.random.default_rng(rows.tokens)
    num_rows = len(rows.seq_lens)
    num_pages = num_rows * rows.width + 1
    elements = page_elements(spec, options("gfx942", dtype, rows.stride))
    features = spec.attention.q_features
    blocks = rng.permutation(np.arange(1, num_pages)).reshape(num_rows, rows.width)
    blocks[len(rows.starts) :] = 0
    return {
        **rows.arguments,
        "q": rounded(rng.standard_normal((rows.tokens, features)), dtype),
        "cache": rounded(rng.standard_normal((num_pages, elements)), dtype),
        "blocks": blocks,
        **({"sinks": SINKS[: spec.attention.heads]} if spec.attention.sinks else {}),
    }


def attend_twice(
    e: Emitter, context: LoweringContext, tensors: dict[str, Tensor], chunk: int | None
) -> list[Tensor]:
    """As two layers do, of which the second finds what the first one left."""
    (tokens, _), (num_rows, _) = tensors["q"].shape, tensors["blocks"].shape
    batch = Batch(
        rows=num_rows,
        tokens=tokens,
        chunk=chunk,
        whole_pages=False,
        **{name: tensors[name] for name in ("starts", "seq_lens")},
        slabs=[
            Slab(
                pool="whole",
                layers=range(len(context.spec.layers)),
                blocks=tensors["blocks"],
                cache=tensors["cache"],
            )
        ],
    )
    batch.offsets = tensors["offsets"]
    batch.counters = e.fill("0", (num_rows, context.spec.attention.kv_heads), "i32")
    launcher = Launcher(context.target, context.rendered)
    if "sinks" in tensors:
        given = GivenWeights({f"blk.{LAYER}.attn_sinks.weight": tensors["sinks"]}, {})
        context = replace(context, weights=given)
    attention = TritonAttention(context, launcher, MatmulOperands(context, launcher))
    return [attention.attend(e, tensors["q"], attend_of(context.spec, LAYER), batch) for _ in range(2)]


def check(spec: ModelSpec, dtype: FloatType, chip: str, launch: Launch, batches: list[Rows]) -> None:
    """Batches that all are of rows of one length, or none."""
    stride, chunk = batches[0].stride, batches[0].chunk
    context = context_of(spec, chip, options(chip, dtype, stride))
    program = launch(
        inputs_of(spec, dtype, stride), lambda e, given: attend_twice(e, context, given, chunk), context
    )
    for rows in batches:
        given = arguments(spec, dtype, rows)
        expected = reference(spec, rows, given)
        for out in program(**given):
            assert np.abs(out - expected)[: rows.compared].max() <= TOLERANCES[dtype]
            assert np.isfinite(out).all()


KINDS: list[tuple[str, FloatType]] = [
    *(("shared", dtype) for dtype in TOLERANCES),
    ("smollm2", "bf16"),
    ("not-a-power-of-two", "f32"),
    ("not-a-power-of-two", "bf16"),
    ("many-share", "f16"),
    ("window", "f32"),
    ("sinks", "f32"),
    ("wide-window", "bf16"),
]


PACKED = [
    Rows([0], [1]),
    Rows([0, 16, 32], [70, 1, 33], padding=5),
    # The context of some single tokens is shared by workgroups.
    Rows([5, 0, 31, 48, 0, 600, 256], [1, 16, 1, 17, 3, 1, 1], padding=5),
    Rows([130] * 13, [1] * 12 + [40]),
    Rows([300, 0], [20, 1], padding=70),  # tiles of padding alone
    Rows([0, 700], [9, 1], padding=6, padding_rows=[6, 6]),
    Rows([700, 3], [1, 20], padding=6, padding_rows=[0, 0]),
]
PREFILLS = [
    Rows([0, 48, 16], [70, 1, 33], chunk=70),
    Rows([300], [3], chunk=5),
]
DECODES = [
    Rows(starts, [1] * len(starts), chunk=1)
    for starts in ([0], [15, 16, 17], [255, 256, 257, 0], [600, 40, 3, 511, 512])
]


ALL_ROWS = {"packed": PACKED, "prefills": PREFILLS, "decodes": DECODES}
# Each kind packed on one chip, and on the other in prefills or decodes.
CASES = [
    case
    for number, kind in enumerate(KINDS)
    for case in (
        ("packed", kind, CHIPS[number // 2 % 2]),
        (("prefills", "decodes")[number % 2], kind, CHIPS[1 - number // 2 % 2]),
    )
]


@pytest.mark.parametrize(
    ("rows", "kind", "chip"),
    CASES,
    ids=lambda each: "-".join(each) if isinstance(each, tuple) else each,
)
def test_attention(rows: str, kind: tuple[str, FloatType], chip: str, launch: Launch) -> None:
    name, dtype = kind
    check(SPECS[name], dtype, chip, launch, ALL_ROWS[rows])


@pytest.mark.parametrize("rows", [PACKED[2], DECODES[3]], ids=["packed", "decode"])
def test_keys_and_values_in_bytes(rows: Rows, chip: str, launch: Launch) -> None:
    """In bf16, for the matrix instructions. Bytes are exact in it, and scales are multiplied in f32."""
    spec, in_bytes = SPECS["smollm2"], replace(options(chip, "bf16", rows.stride), kv="q8_0")
    context = context_of(spec, chip, in_bytes)
    inputs = {
        **inputs_of(spec, "bf16", rows.stride),
        "cache": ("i8", ("pages", page_elements(spec, in_bytes))),
    }
    program = launch(inputs, lambda e, given: attend_twice(e, context, given, rows.chunk), context)
    given = arguments(spec, "bf16", rows)
    quants, scales = quantised_heads(
        given["cache"].reshape(-1, spec.attention.kv_heads, spec.attention.head_dim)
    )
    as_floats = dequantised_heads(quants, scales).reshape(given["cache"].shape)
    as_bytes = rows_in_bytes(quants, scales, spec.attention.read_layout.row_elements(in_bytes.kv)).reshape(
        len(as_floats), -1
    )
    expected = reference(spec, rows, {**given, "cache": as_floats})
    for out in program(**{**given, "cache": as_bytes}):
        assert np.abs(out - expected)[: rows.compared].max() <= TOLERANCES["bf16"]


@pytest.mark.parametrize("stride", [1, 24])
def test_pages_of_any_size(stride: int, chip: str, launch: Launch) -> None:
    check(TINY, "bf16", chip, launch, [Rows([0, 48, 24], [30, 1, 50], stride)])


def test_workgroups_take_more_slots_of_a_context_too_long_for_all(chip: str, launch: Launch) -> None:
    most = tiles_of(resolve_target(f"hip:{chip}")).split * MOST_SPLITS
    starts = [most - 1, 5, most, most + 700, 2 * most]
    check(TINY, "f32", chip, launch, [Rows(starts, [1] * len(starts), chunk=1)])


def test_a_single_token_gets_the_same_bits_packed_and_in_a_decode(chip: str, launch: Launch) -> None:
    starts = [0, 15, 256, 700]
    rows = Rows(starts, [1] * len(starts))
    context = context_of(TINY, chip, options(chip, "bf16", rows.stride))

    def body(e: Emitter, given: dict[str, Tensor]) -> list[Tensor]:
        return [*attend_twice(e, context, given, None), *attend_twice(e, context, given, 1)]

    packed, _, decoded, _ = launch(inputs_of(TINY, "bf16", rows.stride), body, context)(
        **arguments(TINY, "bf16", rows)
    )
    np.testing.assert_array_equal(packed, decoded)


def test_a_token_gets_the_same_bits_whatever_tokens_share_its_tile(chip: str, launch: Launch) -> None:
    """So that slots which all of a tile see, and are attended without masks, make no difference."""
    length, start = 200, 67
    whole, rest = Rows([0], [length], chunk=length), Rows([start], [length - start], chunk=length - start)
    context = context_of(TINY, chip, options(chip, "bf16", whole.stride))
    program = launch(
        inputs_of(TINY, "bf16", whole.stride),
        lambda e, given: attend_twice(e, context, given, length),
        context,
    )
    given = arguments(TINY, "bf16", whole)
    shorter = {**given, **rest.arguments, "q": given["q"][start:]}
    np.testing.assert_array_equal(program(**given)[0][start:], program(**shorter)[0])


# Slots of an AMD GPU, behind which workgroups take more of them each.
MOST_SHARED = tiles_of(resolve_target("hip:gfx942")).split * MOST_SPLITS


@pytest.mark.parametrize(
    ("name", "start", "length", "dtype"),
    [
        ("shared", 0, 150, "bf16"),
        ("shared", 0, 150, "f32"),
        ("smollm2", 230, 60, "bf16"),
        ("smollm2", 230, 60, "f32"),
        ("smollm2", 230, 60, "f16"),
        ("long", MOST_SHARED - 3, 5, "bf16"),  # the tokens of a tile differ in how many slots make a share
        ("not-a-power-of-two", 120, 20, "bf16"),
        ("not-a-power-of-two", 120, 20, "f32"),
        ("window", 70, 80, "bf16"),
        ("wide-window", 380, 70, "bf16"),
        ("sinks", 100, 40, "bf16"),
        ("many-share", 250, 20, "bf16"),
    ],
)
def test_batch_invariant_tokens_have_the_same_bits_in_a_prefill_and_in_a_decode(
    name: str, start: int, length: int, dtype: FloatType, chip: str, launch: Launch
) -> None:
    spec, tokens = SPECS[name], np.arange(start, start + length)
    rows = Rows([start], [length], chunk=length)
    chosen = replace(options(chip, dtype, rows.stride), batch_invariant=True)
    context = context_of(spec, chip, replace(chosen, context_length=spec.max_position_embeddings))

    def attended(rows: Rows, given: dict[str, Array]) -> Array:
        inputs = inputs_of(spec, dtype, rows.stride)
        program = launch(inputs, lambda e, given: attend_twice(e, context, given, rows.chunk), context)
        return program(**given)[0]

    given = arguments(spec, dtype, rows)
    singles = Rows(tokens.tolist(), [1] * length, chunk=1)
    alone = {**given, **singles.arguments, "blocks": given["blocks"].repeat(length, axis=0)}
    prefilled = attended(rows, given)
    assert np.abs(prefilled - reference(spec, rows, given)).max() <= TOLERANCES[dtype]
    np.testing.assert_array_equal(prefilled, attended(singles, alone))


@pytest.mark.parametrize("chunk", [1, 4], ids=["decode", "prefill"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_what_is_before_a_window_does_not_spread(
    batch_invariant: bool, chunk: int, chip: str, launch: Launch
) -> None:
    """NaN, of a request that failed; also where workgroups share the window."""
    spec, start = SPECS["wide-window"], 600
    window = windows_of(spec)[LAYER]
    assert window is not None
    rows = Rows([start], [chunk], chunk=chunk)
    chosen = replace(options(chip, "bf16", rows.stride), batch_invariant=batch_invariant)
    context = context_of(spec, chip, chosen)
    given = arguments(spec, "bf16", rows)
    cache = given["cache"].reshape(len(given["cache"]), len(spec.layers), 2, rows.stride, -1).copy()
    for slot in range(start + 1 - window):
        cache[given["blocks"][0, slot // rows.stride], :, :, slot % rows.stride] = np.nan
    program = launch(
        inputs_of(spec, "bf16", rows.stride),
        lambda e, tensors: attend_twice(e, context, tensors, rows.chunk),
        context,
    )
    for out in program(**{**given, "cache": cache.reshape(given["cache"].shape)}):
        assert np.abs(out - reference(spec, rows, given)).max() <= TOLERANCES["bf16"]
