"""Attention over pages against numpy: rows of any length, as a prefill, packed, and as a decode."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.model.spec import BuildOptions, FloatType, ModelSpec
from tests.builder.compiled_model import TINY
from tests.builder.kernels.triton.conftest import Launch, context_of
from tests.builder.kernels.triton.launched import Inputs, rounded
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.lowering.triton.attention import TritonAttention
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(300)]

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
LAYER = 1
TOLERANCES: dict[str, float] = {"f32": 1e-4, "f16": 2e-2, "bf16": 5e-2}
SPECS = {
    "shared": TINY,
    "smollm2": replace(TINY, num_attention_heads=9, num_key_value_heads=3, head_dim=64),
    "not-a-power-of-two": replace(TINY, num_attention_heads=4, num_key_value_heads=4, head_dim=80),
    "many-share": replace(TINY, num_attention_heads=24, num_key_value_heads=1, head_dim=16),
}


@dataclass(frozen=True)
class Rows:
    """A batch: the tokens that each row has in it, and those before them."""

    starts: I64
    lengths: I64
    stride: int

    @property
    def seq_lens(self) -> I64:
        return self.starts + self.lengths

    @property
    def width(self) -> int:
        return int(-(-self.seq_lens.max() // self.stride))

    @property
    def offsets(self) -> I64:
        return np.cumsum([0, *self.lengths])[:-1]


def reference(spec: ModelSpec, q: F32, cache: F32, blocks: I64, rows: Rows) -> F32:
    """q [tokens, heads, head_dim], cache [pages, layers, 2, stride, kv_heads, head_dim] -> as q."""
    out = np.zeros_like(q)
    sharing = spec.num_attention_heads // spec.num_key_value_heads
    for row, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True)):
        slots = cache[blocks[row], LAYER].swapaxes(0, 1).reshape(2, -1, *cache.shape[4:])
        for i in range(length):
            keys, values = (np.repeat(plane[: start + i + 1], sharing, axis=1) for plane in slots)
            token = rows.offsets[row] + i
            scores = np.einsum("hd,nhd->hn", q[token], keys) / np.sqrt(spec.head_dim)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[token] = np.einsum("hn,nhd->hd", weights / weights.sum(axis=1, keepdims=True), values)
    return out


def check(
    spec: ModelSpec, dtype: FloatType, chip: str, launch: Launch, rows: list[Rows], *, is_decode: bool
) -> None:
    stride = rows[0].stride
    context = context_of(
        spec, chip, BuildOptions(device=f"hip:{chip}", weights=dtype, kv=dtype, block_seq_stride=stride)
    )
    kv_features = spec.num_key_value_heads * spec.head_dim
    elements = spec.num_hidden_layers * 2 * stride * kv_features
    features = spec.num_attention_heads * spec.head_dim
    inputs: Inputs = {
        "q": (dtype, ("tokens", features)),
        "cache": (dtype, ("pages", elements)),
        "offsets": ("i64", ("rows",)),
        "starts": ("i64", ("rows",)),
        "seq_lens": ("i64", ("rows",)),
        "blocks": ("i64", ("rows", "width")),
    }

    def body(e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
        names = ("starts", "seq_lens", "blocks", "cache")
        (tokens, _), (num_rows, _) = tensors["q"].shape, tensors["blocks"].shape
        batch = Batch(
            rows=num_rows,
            tokens=tokens,
            chunk=1 if is_decode else None,
            whole_pages=False,
            **{name: tensors[name] for name in names},
        )
        batch.offsets = tensors["offsets"]
        batch.counters = e.fill("0", (num_rows, spec.num_key_value_heads), "i32")
        attention = TritonAttention(context, Launcher(context.target, context.rendered))
        first = attention.attend(e, tensors["q"], LAYER, batch)
        # Once more, as the next layer finds what the first one left.
        return [first, attention.attend(e, tensors["q"], LAYER, batch)]

    program = launch(inputs, body, context)
    for each in rows:
        rng = np.random.default_rng(len(each.starts))
        num_rows = len(each.starts)
        padding = 0 if is_decode else 5
        num_pages = num_rows * each.width + 1
        cache = rounded(rng.standard_normal((num_pages, elements)), dtype)
        blocks = rng.permutation(np.arange(1, num_pages)).reshape(num_rows, each.width)
        tokens = int(each.lengths.sum())
        q = rounded(rng.standard_normal((tokens + padding, features)), dtype)
        shaped = cache.reshape(num_pages, spec.num_hidden_layers, 2, stride, -1, spec.head_dim)
        expected = reference(spec, q.reshape(len(q), -1, spec.head_dim), shaped, blocks, each)
        batch = {"offsets": each.offsets, "starts": each.starts, "seq_lens": each.seq_lens}
        for out in program(q=q, cache=cache, blocks=blocks, **batch):
            np.testing.assert_allclose(out, expected.reshape(q.shape), rtol=0, atol=TOLERANCES[dtype])


EACH_KIND = pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        pytest.param(SPECS[name], dtype, id=f"{name}-{dtype}")
        for name, dtype in [
            *(("shared", dtype) for dtype in TOLERANCES),
            ("smollm2", "bf16"),
            ("not-a-power-of-two", "f32"),
            ("not-a-power-of-two", "bf16"),
            ("many-share", "f16"),
        ]
    ],
)


@EACH_KIND
def test_packed_rows(spec: ModelSpec, dtype: FloatType, chip: str, launch: Launch) -> None:
    rows = [
        Rows(np.array(starts), np.array(lengths), 16)
        for starts, lengths in [
            ([0], [1]),
            ([0, 16, 32], [70, 1, 33]),
            ([5, 0, 31, 48, 0, 90, 7], [1, 16, 1, 17, 3, 1, 1]),
            ([130] * 13, [1] * 12 + [40]),
        ]
    ]
    check(spec, dtype, chip, launch, rows, is_decode=False)


@EACH_KIND
def test_decoded_rows(spec: ModelSpec, dtype: FloatType, chip: str, launch: Launch) -> None:
    starts = [[0], [15, 16, 17], [255, 256, 257, 0], [600, 40, 3, 511, 512]]
    rows = [Rows(np.array(each), np.ones(len(each), np.int64), 16) for each in starts]
    check(spec, dtype, chip, launch, rows, is_decode=True)


@pytest.mark.parametrize("stride", [1, 24])
def test_pages_of_any_size(stride: int, chip: str, launch: Launch) -> None:
    rows = [Rows(np.array([0, 48, 24]), np.array([30, 1, 50]), stride)]
    check(TINY, "bf16", chip, launch, rows, is_decode=False)
