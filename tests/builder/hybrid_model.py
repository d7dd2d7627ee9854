"""A small model with gated delta nets: what a row computes, and which pages it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from shortfin_apps.llm.model.feed_forward import MoE
from shortfin_apps.llm.model.reference.forward import forward
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.compiled_model import HYBRID, NAN_BYTE, PAGES, Array, CompiledModel
from tests.builder.specs import changed, with_blocks

STRIDE = 4
OPTIONS = BuildOptions(
    weights="f32",
    kv="f32",
    prefill_batch_sizes=(2,),
    decode_batch_sizes=(2,),
    top_k=4,
    block_seq_stride=STRIDE,
)
# Whose last two layers, one of either kind, have experts, one of which all tokens have.
_EXPERTS = MoE(count=5, per_token=2, features=48, shared=32)
MIXED = with_blocks(HYBRID, {1: _EXPERTS, 2: _EXPERTS})
ODD = changed(HYBRID, {"key_dim": 7, "value_dim": 16, "taps": 2})
TILED = changed(HYBRID, {"tiled": True})
TOKENS = (np.arange(1, 30) * 37) % HYBRID.vocab_size
PADDING = TOKENS[:0]
BORDERS = [[29], [8, 29], [1, 2, 3, 29], [4, 20, 28, 29], [13, 14, 29]]  # of chunks
PAGE_IDS = np.array([[7, 3, 9, 1, 8, 2, 5, 4], [11, 12, 13, 14, 15, 16, 17, 18]])


def prefill(
    model: CompiledModel, tokens: Sequence[Array], starts: Sequence[int], blocks: Array = PAGE_IDS
) -> Array:
    """Logits of two rows."""
    rows = np.zeros((2, -(-max(map(len, tokens)) // STRIDE) * STRIDE), np.int64)
    for row, of_row in zip(rows, tokens, strict=True):
        row[: len(of_row)] = of_row
    ends = np.array([start + len(of_row) for start, of_row in zip(starts, tokens, strict=True)])
    return model.prefill("prefill_bs2", rows, np.array(starts), ends, blocks).logits


def first_layer_state(model: CompiledModel) -> Array:
    """Behind the last of TOKENS. Attention, whose last bits depend on chunks, comes after that layer."""
    assert HYBRID.delta_net is not None
    page: Array = model.device.download(model.window_cache[0])[PAGE_IDS[0, (len(TOKENS) - 1) // STRIDE]]
    return page[: HYBRID.delta_net.state_elements]


def in_chunks(model: CompiledModel, borders: Sequence[int]) -> Array:
    """Logits behind the last border of TOKENS, each chunk of which is an invocation of its own."""
    model.fill_cache(NAN_BYTE)
    for start, end in zip([0, *borders], borders, strict=False):
        logits = prefill(model, [TOKENS[start:end], PADDING], [start, 0])
    last: Array = logits[0]
    return last


def expected_logits(model: CompiledModel) -> Array:
    """[TOKENS, vocab]"""
    has_bytes = model.options.kv == "q8_0"
    return forward(model.spec, model.weights, TOKENS, has_quantised_cache=has_bytes)


def check_chunks(model: CompiledModel, borders: Sequence[int], tolerance: float) -> None:
    """They change no bit of a state."""
    expected = expected_logits(model)[-1]
    np.testing.assert_allclose(in_chunks(model, borders), expected, rtol=tolerance, atol=tolerance)
    state = first_layer_state(model)
    in_chunks(model, [12, 29])
    np.testing.assert_array_equal(state, first_layer_state(model))


def check_decodes(model: CompiledModel, tolerance: float) -> None:
    """They go on from a prefill across borders of pages, beside a row of another sequence."""
    expected = expected_logits(model)
    in_chunks(model, [14])
    for position in range(14, len(TOKENS)):
        tokens, starts = TOKENS[[[position], [0]]], np.array([position, 0])
        logits = model.decode("decode_bs2", tokens, starts, PAGE_IDS).logits
        np.testing.assert_allclose(logits[0], expected[position], rtol=tolerance, atol=tolerance)


def check_rows_are_independent(model: CompiledModel) -> None:
    alone = in_chunks(model, [17])
    model.fill_cache(0)
    both = prefill(model, [TOKENS[:17], TOKENS[5:20]], [0, 0])
    np.testing.assert_array_equal(both[0], alone)


def check_blocks_without_pages(model: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row reads its first page and writes its last, and in between the pages that it has."""
    expected = in_chunks(model, [6, 29])
    in_chunks(model, [6])
    before = model.device.download(model.window_cache[0])
    window_ids = PAGE_IDS.copy()
    window_ids[0, [0, 2, 3, 4, 6]] = 0
    monkeypatch.setattr(model, "tables", lambda *_: [PAGE_IDS, window_ids])
    got = prefill(model, [TOKENS[6:], PADDING], [6, 0])[0]
    np.testing.assert_array_equal(got, expected)
    after = model.device.download(model.window_cache[0])
    changed = {page for page in range(PAGES) if before[page].tobytes() != after[page].tobytes()}
    assert changed == set(PAGE_IDS[0, [1, 5, 7]].tolist())


def states(model: CompiledModel) -> Array:
    """[PAGES, state elements of all layers]"""
    pages: Array = model.device.download(model.window_cache[0])
    return pages[:PAGES].view(np.float32)


def check_followers(model: CompiledModel) -> None:
    """Rows of one request in an `extend` have the bits of decodes one by one; each leaves its own state.

    Before and after them are rows of other requests, and padding.
    """
    first, count = 14, 8  # across the ends of two pages
    in_chunks(model, [first])
    logits, expected = [], []
    for position in range(first, first + count):
        starts = np.array([position, 0])
        logits.append(model.decode("decode_bs2", TOKENS[[[position], [0]]], starts, PAGE_IDS).logits[0])
        expected.append(states(model)[PAGE_IDS[0, position // STRIDE]].copy())
    chunk = prefill(model, [TOKENS[:5], PADDING], [0, 0], PAGE_IDS[1:].repeat(2, axis=0))[0]

    positions = np.arange(first, first + count)
    blocks = PAGE_IDS[[1, *[0] * count, 1]]
    blocks[-1] = 0

    def extended(window_blocks: Array) -> Array:
        in_chunks(model, [first])
        result = model.extend(
            "extend",
            np.concatenate([TOKENS[:5], TOKENS[positions], [0]]),
            np.array([0, *range(5, 5 + count), 5 + count]),
            np.array([0, *positions, 0]),
            np.array([5, *(positions + 1), 1]),
            blocks,
            followers=np.array([0, count - 1, *[-1] * (count - 1), 0]),
            window_blocks=window_blocks,
        )
        np.testing.assert_array_equal(result.logits[0], chunk)
        np.testing.assert_array_equal(result.logits[1:-1], logits)
        return states(model)

    in_chunks(model, [first])
    before = states(model).copy()
    window_blocks = blocks.copy()
    # The first row goes on from its own page, which holds the state before; the others get a page each.
    own = np.array([PAGE_IDS[0, first // STRIDE], *range(21, 20 + count)])
    window_blocks[1:-1, :] = PAGES - 1  # a page that nobody reads
    window_blocks[np.arange(1, 1 + count), positions // STRIDE] = own
    after = extended(window_blocks)
    np.testing.assert_array_equal(after[own], expected)
    changed = {page for page in range(1, PAGES) if before[page].tobytes() != after[page].tobytes()}
    assert changed == {*own.tolist(), *PAGE_IDS[1, :2].tolist()}

    # Known tokens share a block table: its pages have the state after the last token of each block.
    after = extended(blocks)
    for block in range(first // STRIDE, (first + count - 1) // STRIDE + 1):
        last = min(first + count, (block + 1) * STRIDE) - 1
        np.testing.assert_array_equal(after[PAGE_IDS[0, block]], expected[last - first])
