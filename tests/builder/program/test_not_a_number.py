"""NaN in one sequence's K or V, in each entry: its own row says so, and no other row differs by a bit.

What is not a number gets past a product with 0, so a mask is not enough: what a row may not read must not be
multiplied. Infinity is tried as well; whose K holds that may attend to the rest and never notice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.components.runtime.iree_local import LocalBuffer
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.compiled_model import (
    ALL_DTYPES,
    GENERIC,
    NAN_BYTE,
    PAGES,
    TINY,
    Array,
    CompiledModel,
    Result,
    block_table,
)
from tests.builder.conftest import MODELS, CompiledModels, Recipe

pytestmark = pytest.mark.slow

STRIDE = 16
HISTORIES = np.array([32, 48, 16])  # tokens of each row in the cache; whole pages, so that every slot is read
NEW = 30  # tokens of each row that the longest call computes
WIDTH = 5
ENTRIES = ["prefill_bs3", "prefill_bs3_s32", "decode_bs4", "extend", "extend_t64"]
# As f32; bf16 has the upper half.
NUMBERS = {"nan": 0x7FC00000, "all-bits": 0xFFFFFFFF, "inf": 0x7F800000, "minus-inf": 0xFF800000}

Tokens = npt.NDArray[np.int64]


OPTIONS = BuildOptions(
    weights="bf16",
    kv="bf16",
    prefill_batch_sizes=(1, 3),
    decode_batch_sizes=(1, 4),
    chunk_sizes=(32,),
    extend_sizes=(64,),
    top_k=8,
)
# The GPUs' form, and vectors without AVX-512, which this CPU runs as well.
OTHER_FORMS: dict[str, Recipe] = {
    "generic": (TINY, OPTIONS, GENERIC),
    "generic-kv-q8_0": (TINY, replace(OPTIONS, kv="q8_0"), GENERIC),
}
if GENERIC.architecture == "x86_64":
    OTHER_FORMS["avx2"] = (TINY, OPTIONS, resolve_target("cpu:x86-64-v3"))


@pytest.fixture(scope="module")
def forms(device: Device, tmp_path_factory: pytest.TempPathFactory) -> CompiledModels:
    return CompiledModels(MODELS | OTHER_FORMS, device, tmp_path_factory)


@pytest.fixture(params=["f32", "bf16", "int8", "kv-q8_0", "generic", "generic-kv-q8_0", "avx2"])
def rows(request: pytest.FixtureRequest, forms: CompiledModels) -> Rows:
    return Rows(forms[request.param], is_generic=request.param.startswith("generic"))


class Rows:
    """Three sequences in the cache, with more tokens to come."""

    def __init__(self, model: CompiledModel, *, is_generic: bool) -> None:
        self.model = model
        self.is_generic = is_generic
        self.rng = np.random.default_rng(5)
        self.blocks = block_table(self.rng, [WIDTH] * 3, WIDTH)
        self.tokens = [self.rng.integers(0, TINY.vocab_size, length + NEW) for length in HISTORIES]
        model.fill_cache(0)
        for row, length in enumerate(HISTORIES):
            self.prefill(self.tokens[row][:length], self.blocks[row])
        self.before = self.pages.copy()

    @property
    def pages(self) -> Array:
        """[PAGES, elements], writable."""
        content = cast(LocalBuffer, self.model.cache).map_bytes()
        return content.view(ALL_DTYPES[self.model.options.cache_dtype]).reshape(PAGES, -1)

    def prefill(self, tokens: Tokens, blocks: Tokens) -> Result:
        padded = np.zeros((1, -(-len(tokens) // STRIDE) * STRIDE), np.int64)
        padded[0, : len(tokens)] = tokens
        return self.model.prefill(
            "prefill_bs1", padded, np.array([0]), np.array([len(tokens)]), blocks[None, :]
        )

    def run(self, entry: str) -> Result:
        """The next tokens of all three; an extend decodes the first."""
        lengths = [1, 20, NEW] if entry.startswith("extend") else [NEW] * 3
        parts = [t[h : h + n] for t, h, n in zip(self.tokens, HISTORIES, lengths, strict=True)]
        if entry.startswith("prefill"):
            padded = np.stack([np.pad(part, (0, 32 - NEW)) for part in parts])
            return self.model.prefill(entry, padded, HISTORIES, HISTORIES + NEW, self.blocks)
        if entry.startswith("decode"):
            firsts = np.array([[part[0]] for part in parts] + [[0]])
            padding = np.zeros_like(self.blocks[:1])
            return self.model.decode(
                entry, firsts, np.append(HISTORIES, 0), np.concatenate([self.blocks, padding])
            )
        packed = np.pad(np.concatenate(parts), (0, 64 - sum(lengths) if entry == "extend_t64" else 3))
        offsets = np.cumsum([0, *lengths])[:-1]
        return self.model.extend(entry, packed, offsets, HISTORIES, HISTORIES + lengths, self.blocks)

    def poison(self, row: int, layer: int, plane: int, number: str) -> None:
        """One element of K (`plane` 0) or V in one of the row's full pages; of bytes, a head's scale."""
        spec, kv = self.model.spec, ALL_DTYPES[self.model.options.cache_dtype]
        page = self.blocks[row, self.rng.integers(HISTORIES[row] // STRIDE)]
        if self.model.options.kv == "q8_0":
            first = self.scale_at(2 * layer + plane)
            self.pages[page, first : first + 4] = np.array([NUMBERS[number]], np.uint32).view(np.int8)
            return
        size = spec.attention.kv_features * STRIDE
        element = (2 * layer + plane) * size + self.rng.integers(size)
        bits = np.array(NUMBERS[number], np.uint32) >> (32 - 8 * kv.itemsize)
        self.pages[page, element] = bits.astype(f"u{kv.itemsize}").view(kv)

    def scale_at(self, plane: int) -> int:
        """The byte of a page at which the scale of one slot and head begins, of a layer's K or V."""
        spec = self.model.spec
        heads, values = spec.attention.kv_heads, spec.attention.head_dim
        slot, head = self.rng.integers(STRIDE), self.rng.integers(heads)
        if self.is_generic:
            row = spec.attention.read_layout.row_elements(self.model.options.kv)
            return int((plane * STRIDE + slot) * row + heads * values + 4 * head)
        of_head = STRIDE * (values + 4)
        return int((plane * heads + head) * of_head + STRIDE * values + 4 * slot)

    def serve_next(self, row: int) -> list[Array]:
        """Results of somebody else who gets the row's pages."""
        blocks = self.blocks[row]
        results = [self.prefill(self.tokens[0][:length], blocks) for length in (5, 40)]
        start = np.array([40])
        results.append(self.model.decode("decode_bs1", np.array([[7]]), start, blocks[None, :]))
        return [array for r in results for array in (r.values, r.indices, r.logits)]


@pytest.mark.parametrize("number", list(NUMBERS))
@pytest.mark.parametrize("entry", ENTRIES)
def test_nan_stays_in_its_row(rows: Rows, entry: str, number: str) -> None:
    expected = rows.run(entry)
    written = rows.pages.view(np.uint8).copy()
    rows.pages[:] = 0
    unspoiled = rows.serve_next(0)
    for row in range(3):
        others = [other for other in range(3) if other != row]
        for layer in range(len(TINY.layers)):
            for plane in range(2):
                rows.pages[:] = rows.before
                rows.poison(row, layer, plane, number)
                got = rows.run(entry)
                for name in ("values", "indices", "logits"):
                    mine, whole = getattr(got, name), getattr(expected, name)
                    np.testing.assert_array_equal(mine[others], whole[others], err_msg=name)
                theirs = rows.blocks[others].reshape(-1)
                np.testing.assert_array_equal(rows.pages.view(np.uint8)[theirs], written[theirs])
                if "inf" not in number:
                    assert np.isnan(got.values[row]).all()
                    assert np.isnan(got.logits[row]).any()
        for clean, after in zip(unspoiled, rows.serve_next(row), strict=True):
            np.testing.assert_array_equal(after, clean)


@pytest.mark.parametrize("entry", ENTRIES)
def test_nan_on_the_scratch_page_is_nobodys(rows: Rows, entry: str) -> None:
    """Padding writes there, and block tables name it where a row has no page."""
    rows.blocks = np.pad(rows.blocks, ((0, 0), (0, 2)))
    expected = rows.run(entry)
    rows.pages[:] = rows.before
    rows.pages.view(np.uint8)[0] = NAN_BYTE
    got = rows.run(entry)
    for name in ("values", "indices", "logits"):
        np.testing.assert_array_equal(getattr(got, name)[:3], getattr(expected, name)[:3], err_msg=name)
