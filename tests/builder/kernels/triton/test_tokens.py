"""What layers need of a batch, and rows' last tokens, against numpy: packed, of one length, decoded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.batch import Batch, Slab
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.graph.rotary import rotary_frequencies
from shortfin_apps.llm.builder.lowering.lowering import Lowering, RenderedKernels, Values
from shortfin_apps.llm.model.operations import LastTokens, Linear, Norm, Operation
from shortfin_apps.llm.model.spec import BuildOptions, FloatType
from tests.builder.compiled_model import TINY
from tests.builder.kernels.triton.conftest import Launch, context_of
from tests.builder.kernels.triton.given_weights import GivenWeights
from tests.builder.kernels.triton.launched import Array, Inputs
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.lowering.triton.layers import TritonLayers
from tests.builder.specs import changed

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(300)]

I64 = npt.NDArray[np.int64]
LENGTH = 200_000  # tokens of a context
STRIDE = 24
WIDTH = 9_000
# Half a head is 24 angles, which is no power of two.
SPEC = changed(TINY, {"head_dim": 48, "max_position_embeddings": LENGTH, "hidden_size": 80})
PAGE_ROWS = len(SPEC.layers) * 2 * STRIDE


@dataclass(frozen=True)
class Tokens:
    """A batch: rows' first positions, their tokens and, behind these, padding of rows or of the batch."""

    starts: I64
    lengths: I64
    chunk: int | None  # tokens of every row, or None for packed ones
    padding: int = 0  # tokens after the last packed row

    @property
    def offsets(self) -> I64:
        lengths = self.lengths if self.chunk is None else np.full_like(self.lengths, self.chunk)
        return np.cumsum([0, *lengths])[:-1]

    @property
    def total(self) -> int:
        if self.chunk is not None:
            return self.chunk * len(self.starts)
        return int(self.lengths.sum()) + self.padding

    @property
    def rows(self) -> I64:
        """[tokens]: the last row that begins at or before each."""
        return np.searchsorted(self.offsets, np.arange(self.total), side="right") - 1

    @property
    def positions(self) -> I64:
        found: I64 = self.starts[self.rows] + np.arange(self.total) - self.offsets[self.rows]
        return found


PACKED = [
    Tokens(np.array([0]), np.array([1]), None),
    Tokens(np.array([5, 0, LENGTH - 30]), np.array([1, 7, 30]), None, padding=6),
    Tokens(
        np.arange(70) * 24, 1 + np.arange(70) % 3, None, padding=1
    ),  # more rows than are looked at at once
]
PREFILLS = [
    Tokens(np.array([0, 48, 123_456]), np.array([7, 1, 5]), 7),
    Tokens(np.array([72]), np.array([3]), 7),
]
DECODES = [
    Tokens(np.array([0]), np.array([1]), 1),
    Tokens(np.array([17, 0, 23, 24, LENGTH - 1]), np.array([1, 1, 1, 0, 1]), 1),
]


def options(chip: str, dtype: FloatType = "f32") -> BuildOptions:
    return BuildOptions(
        device=f"hip:{chip}", weights=dtype, kv=dtype, block_seq_stride=STRIDE, context_length=LENGTH
    )


def batch_of(tensors: dict[str, Tensor], tokens: Dim, chunk: Dim | None) -> Batch:
    [rows] = tensors["starts"].shape
    return Batch(
        rows=rows,
        tokens=tokens,
        chunk=chunk,
        whole_pages=False,
        **{name: tensors[name] for name in ("starts", "seq_lens")},
        slabs=[
            Slab(
                pool="whole",
                layers=range(len(SPEC.layers)),
                blocks=tensors["blocks"],
                cache=tensors["starts"],
            )
        ],
        given_offsets=tensors["offsets"] if chunk is None else None,
    )


INPUTS: Inputs = {
    "offsets": ("i64", ("rows",)),
    "starts": ("i64", ("rows",)),
    "seq_lens": ("i64", ("rows",)),
    "blocks": ("i64", ("rows", "width")),
    "x": ("f32", ("tokens", SPEC.hidden_size)),
}


def arguments(given: Tokens) -> dict[str, Array]:
    rng = np.random.default_rng(given.total)
    return {
        "offsets": given.offsets,
        "starts": given.starts,
        "seq_lens": given.starts + given.lengths,
        "blocks": rng.integers(1, 1 << 40, (len(given.starts), WIDTH)),
        "x": rng.standard_normal((given.total, SPEC.hidden_size), np.float32),
    }


KINDS = [
    pytest.param(PACKED, id="packed"),
    pytest.param(PREFILLS, id="prefills"),
    pytest.param(PREFILLS[:1], id="prefill-of-a-fixed-length"),
    pytest.param(DECODES, id="decodes"),
]


def chunk_of(e: Emitter, tensors: dict[str, Tensor], batches: list[Tokens]) -> Dim | None:
    """The tokens of every row, which are known at compile time in a decode and where there is one batch."""
    fixed = batches[0].chunk
    if fixed is None or fixed == 1 or len(batches) == 1:
        return fixed
    (tokens, _), (rows, _) = tensors["x"].shape, tensors["blocks"].shape
    return e.value(f"arith.divui {e.index(tokens)}, {e.index(rows)} : index")


@pytest.mark.parametrize("batches", KINDS)
def test_slots_cosines_sines_offsets_and_counters(batches: list[Tokens], chip: str, launch: Launch) -> None:
    context = context_of(SPEC, chip, options(chip))
    has_counters = batches[0].chunk in (None, 1)

    def body(e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
        batch = batch_of(tensors, tensors["x"].shape[0], chunk_of(e, tensors, batches))
        TritonLayers(context).prepare(e, batch)
        other = batch.counters if has_counters else batch.offsets
        assert batch.slots is not None
        assert other is not None
        batch.turn_to(0, SPEC.attention.rotation)
        return [batch.slots, batch.rotary, other]

    program = launch(INPUTS, body, context)
    for given in batches:
        made = arguments(given)
        slots, rotary, other = program(**made)
        rows, positions = given.rows, given.positions
        owned = positions < (given.starts + given.lengths)[rows]
        pages = made["blocks"][rows, np.minimum(positions // STRIDE, WIDTH - 1)]
        np.testing.assert_array_equal(slots, np.where(owned, pages, 0) * PAGE_ROWS + positions % STRIDE)
        angles = positions[owned, None] * rotary_frequencies(
            SPEC.attention.rotation, SPEC.max_position_embeddings
        )
        expected = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        np.testing.assert_allclose(rotary[owned], expected, rtol=0, atol=3e-7)
        assert np.isfinite(rotary).all()
        zeros = np.zeros((len(given.starts), SPEC.attention.kv_heads))
        np.testing.assert_array_equal(other, zeros if has_counters else given.offsets)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("batches", KINDS)
def test_last_tokens_between_matmuls(
    batches: list[Tokens], dtype: FloatType, chip: str, launch: Launch
) -> None:
    """The norm behind them is deferred to the last matmul in f32, and a launch in f16."""
    hidden, classes = SPEC.hidden_size, 30
    context = context_of(SPEC, chip, options(chip, dtype))
    inputs: Inputs = {
        **INPUTS,
        "x": (dtype, ("tokens", hidden)),
        "down": (dtype, (hidden, hidden)),
        "norm": ("f32", (hidden,)),
        "head": (dtype, (classes, hidden)),
    }
    run: list[Operation] = [
        Linear("x", "sum", "down"),
        LastTokens("sum", "last"),
        Norm("last", "normed", "norm"),
        Linear("normed", "logits", "head"),
    ]

    def body(e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
        layers = TritonLayers(replace(context, weights=GivenWeights(tensors)))
        batch = batch_of(tensors, tensors["x"].shape[0], chunk_of(e, tensors, batches))
        layers.prepare(e, batch)
        values = Values({"x": tensors["x"]}, batch)
        kernels = dict.fromkeys((Linear, LastTokens, Norm), layers)
        Lowering(kernels, RenderedKernels(), layers).lower(e, run, values, ["logits"])
        return [values["last"], values["logits"]]

    program = launch(inputs, body, context)
    is_decode = batches is DECODES
    assert is_decode != any(kernel.startswith("last_tokens") for kernel in context.rendered.texts)
    rng = np.random.default_rng(1)
    down, head = (rng.standard_normal((n, hidden), np.float32) * hidden**-0.5 for n in (hidden, classes))
    norm = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
    for given in batches:
        made = arguments(given)
        last, logits = program(**made, down=down, norm=norm, head=head)
        at = given.offsets + np.maximum(given.lengths - 1, 0)
        expected = (made["x"] @ down.T)[at]
        tolerance = 1e-4 if dtype == "f32" else 2e-2
        np.testing.assert_allclose(last, expected, rtol=0, atol=tolerance)
        scale = 1 / np.sqrt((expected**2).mean(axis=1, keepdims=True) + SPEC.rms_norm_eps)
        np.testing.assert_allclose(logits, (expected * scale * norm) @ head.T, rtol=0, atol=tolerance)
