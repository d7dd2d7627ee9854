"""Rows with random histories in a model's cache, whose next tokens its entries compute and numpy checks.

The history of a row is random K and V written to its pages by the test, so that position 8,300 costs no
prefill of 8,300 tokens. It takes the layout of pages that lowering/linalg has, so the model is one for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.contract.abi import Entry
from shortfin_apps.llm.model.attention import dequantised_heads, quantised_heads
from shortfin_apps.llm.model.kv_layout import KeysValues
from shortfin_apps.llm.model.reference.forward import forward
from shortfin_apps.llm.model.reference.pointwise import F32
from tests.builder.compiled_model import DTYPES, CompiledModel, Result, block_table
from tests.builder.specs import layouts_of

NUM_PADDING_TOKENS = 5  # behind the tokens of an extend

Tokens = npt.NDArray[np.int64]


class CachedRows:
    """Row r has `positions[r]` positions in the cache and pages for `room` more.

    Each method computes new random tokens of the rows that it is given and compares their logits with the
    reference's: an AssertionError names the entry and the position. Entries with more rows get padding rows.
    """

    def __init__(
        self, model: CompiledModel, positions: Sequence[int], room: int, key_scale: float, tolerance: float
    ) -> None:
        self._model = model
        self._tolerance = tolerance
        self._stride = model.options.block_seq_stride
        self._rng = np.random.default_rng(11)
        counts = [-(-(length + room) // self._stride) for length in positions]
        self._blocks = block_table(self._rng, counts, max(counts), sum(counts) + 1)
        pages = self._fill_cache(sum(counts) + 1, key_scale)
        self._past = [self._history(pages, row, length) for row, length in enumerate(positions)]
        self._tokens = [np.zeros(0, np.int64) for _ in positions]

    def _fill_cache(self, num_pages: int, key_scale: float) -> list[F32]:
        """Of each layer, [pages, planes, stride, kv_heads, head_dim], rounded as the cache has it.

        Layers that read the cache of another layer have some, too, which nothing reads.
        """
        spec = self._model.spec
        stored, known = [], []
        for layout in layouts_of(spec):
            planes = layout.planes(self._model.options.stores_values)
            shape = (num_pages, planes, self._stride, layout.kv_heads, layout.head_dim)
            pages = self._rng.standard_normal(shape, np.float32)
            pages[:, 0] *= key_scale
            kept, rounded = self._stored(pages, layout)
            stored.append(kept.reshape(num_pages, -1))
            known.append(rounded)
        pools = spec.pools.values()
        self._model.set_cache(*(np.concatenate([stored[n] for n in layers], axis=1) for layers in pools))
        return known

    def _stored(self, pages: F32, layout: KeysValues) -> tuple[npt.NDArray[Any], F32]:
        """The pages in the cache's type, and what they are in f32."""
        kv = self._model.options.kv
        if kv != "q8_0":
            kept = pages.astype(DTYPES[kv])
            return kept, kept.astype(np.float32)
        quants, scales = quantised_heads(pages)
        rows = rows_in_bytes(quants, scales, layout.row_elements(kv))
        return rows, dequantised_heads(quants, scales)

    def _history(self, pages: list[F32], row: int, length: int) -> list[F32]:
        """Of each layer, [2, positions, kv_heads, head_dim] of a row; a single plane is both."""
        own = (np.moveaxis(each[self._blocks[row]], 0, 1) for each in pages)
        planes = (each.reshape(len(each), -1, *each.shape[3:])[:, :length] for each in own)
        return [each[[0, -1]] for each in planes]

    def decode(self, entry: str, rows: Sequence[int]) -> None:
        """Decodes one token of each of `rows`."""
        starts = [self._position(row) for row in rows]
        tokens = [self._next(row, 1) for row in rows]
        padding = _num_rows(entry) - len(rows)
        blocks = np.pad(self._blocks[rows], ((0, padding), (0, 0)))
        result = self._model.decode(entry, _padded(tokens, padding), np.pad(starts, (0, padding)), blocks)
        self._check(entry, rows, result)

    def prefill(self, entry: str, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Prefills so many tokens of each of `rows`, from its last whole page on."""
        for row in rows:
            self._cut_to_whole_pages(row)
        padding = _num_rows(entry) - len(rows)
        starts = np.pad([self._position(row) for row in rows], (0, padding))
        seq_lens = starts + np.pad(lengths, (0, padding), constant_values=1)
        tokens = [self._next(row, length) for row, length in zip(rows, lengths, strict=True)]
        blocks = np.pad(self._blocks[rows], ((0, padding), (0, 0)))
        padded = _padded(tokens, padding, _parse(entry).length or self._stride)
        result = self._model.prefill(entry, padded, starts, seq_lens, blocks)
        self._check(entry, rows, result)

    def extend(self, entry: str, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """So many tokens of each of `rows` in one invocation."""
        starts = np.array([self._position(row) for row in rows])
        offsets = np.cumsum([0, *lengths])[:-1]
        tokens = [self._next(row, length) for row, length in zip(rows, lengths, strict=True)]
        length = _parse(entry).length or sum(lengths) + NUM_PADDING_TOKENS
        packed = np.pad(np.concatenate(tokens), (0, length - sum(lengths)))
        result = self._model.extend(entry, packed, offsets, starts, starts + lengths, self._blocks[rows])
        self._check(entry, rows, result)

    def _position(self, row: int) -> int:
        """The first position of the row that is not in the cache."""
        positions: int = self._past[row][0].shape[1]
        return positions + len(self._tokens[row])

    def _next(self, row: int, count: int) -> Tokens:
        new = self._rng.integers(0, self._model.spec.vocab_size, count)
        self._tokens[row] = np.concatenate([self._tokens[row], new])
        return new

    def _cut_to_whole_pages(self, row: int) -> None:
        assert not len(self._tokens[row]), "only histories are cut"
        length = self._position(row) // self._stride * self._stride
        self._past[row] = [each[:, :length] for each in self._past[row]]

    def _check(self, entry: str, rows: Sequence[int], result: Result) -> None:
        for index, row in enumerate(rows):
            expected = forward(
                self._model.spec,
                self._model.weights,
                self._tokens[row],
                self._past[row],
                has_quantised_cache=self._model.options.kv == "q8_0",
            )[-1]
            where = f"{entry}, row {index}: token at position {self._position(row) - 1}"
            np.testing.assert_allclose(
                result.logits[index], expected, rtol=0, atol=self._tolerance, err_msg=where
            )
        order = np.argsort(-result.logits, axis=1, kind="stable")[:, : result.indices.shape[1]]
        real = slice(0, len(rows))
        np.testing.assert_array_equal(result.indices[real], order[real], err_msg=entry)
        best = np.take_along_axis(result.logits, order, axis=1)
        np.testing.assert_array_equal(result.values[real], best[real], err_msg=entry)


def rows_in_bytes(quants: npt.NDArray[np.int8], scales: F32, row_bytes: int) -> npt.NDArray[np.int8]:
    """[.., row_bytes]: of quants [.., heads, head_dim] and scales [.., heads]; padding is NaN."""
    rows = scales.shape[:-1]
    parts = [quants.reshape(*rows, -1), scales.view(np.int8)]
    used = sum(part.shape[-1] for part in parts)
    return np.concatenate([*parts, np.full((*rows, row_bytes - used), -1, np.int8)], axis=-1)


def _num_rows(entry: str) -> int:
    rows = _parse(entry).rows
    assert rows is not None
    return rows


def _parse(name: str) -> Entry:
    entry = Entry.parse(name)
    assert entry is not None
    return entry


def _padded(tokens: Sequence[Tokens], padding: int, multiple: int = 1) -> Tokens:
    """[rows + padding, longest], a multiple of `multiple` long, 0 where there is no token."""
    longest = -(-max(map(len, tokens)) // multiple) * multiple
    rows = [np.pad(row, (0, longest - len(row))) for row in tokens]
    return np.pad(np.stack(rows), ((0, padding), (0, 0)))
