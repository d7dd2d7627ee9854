"""Per-token data of a batch, computed once for all layers, and each row's last token."""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.product import store_scaled_row


@triton.jit
def row_at(offsets, rows, place, SIZE: tl.constexpr, APART: tl.constexpr):
    """Return the last row r with offsets[r] // SIZE + r * APART <= place, for ascending offsets [rows] i64.

    All offsets are compared, as a binary search would wait for memory at every step.
    """
    BLOCK: tl.constexpr = 64
    found = 0
    for first in range(1, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < rows
        offset = tl.load(offsets + row, mask=inside, other=0).to(tl.int32)
        begun = inside & (offset // SIZE + row * APART <= place)
        found += tl.sum(begun.to(tl.int32), axis=0)
    return found


@triton.jit
def prepare(
    given_offsets, starts, seq_lens, blocks, coarse, fine, offsets, slots, rotary, counters, barrier, chunk,
    rows, width,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr,
    STRIDE: tl.constexpr, PAGE_ROWS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Compute each token's cache row, and its RoPE cosines and sines, for all layers.

    A workgroup handles one token. The tokens of batch row r start at given_offsets[r] i64; if
    `given_offsets` is None, each row has `chunk` tokens. `starts`, `seq_lens` [rows] i64 and `blocks` [rows,
    width] i64 describe the batch (see abi.py). `coarse` [STEPS, 2, HALF] and `fine` [STEP, 2, HALF] f32 are
    the tables of graph/rotary.py.

    Writes `slots` [tokens] i64, the cache row of each token's key in layer 0 as in `cache_slots` of
    graph/token_layout.py; and `rotary` [tokens, 2, HALF] f32, the cosines and sines. If not None, writes the
    index of each row's first token to `offsets` [rows] i64, and zeros to `counters` [rows, KV_HEADS] i32 and
    `barrier` [1] i32.
    """
    token = tl.program_id(0)
    if given_offsets is None:
        row = token // chunk
        first = row * chunk
    else:
        row = row_at(given_offsets, rows, token, 1, 0)
        first = tl.load(given_offsets + row).to(tl.int32)
    if offsets is not None:
        tl.store(offsets + row, first.to(tl.int64), mask=token == first)
    if counters is not None:
        if token == 0:
            store_zeros(counters, rows * KV_HEADS)
    if barrier is not None:
        tl.store(barrier, 0, mask=token == 0)
    position = tl.load(starts + row).to(tl.int32) + token - first
    is_owned = (position < tl.load(seq_lens + row)) & (position < width * STRIDE)
    page = tl.load(blocks + row.to(tl.int64) * width + position // STRIDE, mask=is_owned, other=0)
    tl.store(slots + token, page * PAGE_ROWS + position % STRIDE)

    angle = tl.arange(0, BLOCK_HALF)
    inside = angle < HALF
    big = coarse + tl.minimum(position // STEP, STEPS - 1) * (2 * HALF) + angle
    small = fine + position % STEP * (2 * HALF) + angle
    big_cosine = tl.load(big, mask=inside, other=0.0)
    big_sine = tl.load(big + HALF, mask=inside, other=0.0)
    small_cosine = tl.load(small, mask=inside, other=0.0)
    small_sine = tl.load(small + HALF, mask=inside, other=0.0)
    at = rotary + token.to(tl.int64) * (2 * HALF) + angle
    tl.store(at, big_cosine * small_cosine - big_sine * small_sine, mask=inside)
    tl.store(at + HALF, big_sine * small_cosine + big_cosine * small_sine, mask=inside)


@triton.jit
def store_zeros(numbers, count):
    """Set numbers [count] to 0, with one workgroup."""
    BLOCK: tl.constexpr = 256
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(numbers + at, tl.zeros((BLOCK,), numbers.dtype.element_ty), mask=at < count)


@triton.jit
def last_tokens(
    x, offsets, starts, seq_lens, norm, y, scaled, squares, tokens,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Copy each row's last token that is not padding from x [tokens, FEATURES] f32 to y [rows, FEATURES] f32.

    A workgroup handles one row. With `norm`, also writes `scaled` and `squares` for the next matmul.
    """
    row = tl.program_id(0)
    length = tl.load(seq_lens + row) - tl.load(starts + row)
    last = tl.load(offsets + row) + tl.maximum(length - 1, 0)
    token = tl.minimum(last, tokens - 1)
    feature = tl.arange(0, BLOCK)
    inside = feature < FEATURES
    values = tl.load(x + token * FEATURES + feature, mask=inside, other=0.0)
    tl.store(y + row.to(tl.int64) * FEATURES + feature, values, mask=inside)
    store_scaled_row(values, norm, scaled, squares, row, feature, inside, FEATURES, GROUP)
