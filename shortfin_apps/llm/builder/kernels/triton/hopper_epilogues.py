"""Epilogues of the matmuls for Hopper, in Gluon (see hopper_product.py).

Sums are f32 [COUNT, columns] for the COUNT rows of x from a row `first` on (`tile_rows`). Addresses are those
of a scalar row plus 32-bit offsets: 64-bit offsets would not fit in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from shortfin_apps.llm.builder.kernels.triton.cached_bytes import (
    SCALE_BYTES,
    magnitude,
    rounded,
    scale_for,
    scales_of,
)
from shortfin_apps.llm.builder.kernels.triton.hopper_product import first_loaded, loaded_rows, row_sums
from shortfin_apps.llm.builder.kernels.triton.linear import gated
from shortfin_apps.llm.builder.kernels.triton.product import sums_of_neighbours
from shortfin_apps.llm.builder.kernels.triton.qkv import rotated


@gluon.jit
def tile_rows(first, tokens, sums):
    """Return the rows of x that `sums` [COUNT, columns] are of.

    They are the first row, as i64, the rows relative to it [COUNT], and whether a row is to be stored [COUNT,
    1]: it is in range, and not of the rows before `first`, which another tile stores.
    """
    COUNT: gl.constexpr = sums.shape[0]
    start = first_loaded(first, tokens, COUNT)
    row = gl.arange(0, COUNT, gl.SliceLayout(1, sums.type.layout))
    return start.to(gl.int64), row, ((row >= first - start) & (row < tokens - start))[:, None]


@gluon.jit
def store_columns(
    sums, first, column, tokens, residual, norm, y, scaled, squares, OUT: gl.constexpr, GROUP: gl.constexpr
):
    """Write the columns of y [tokens, OUT] from `column` on: the sums, plus any `residual`.

    With `norm` [OUT], also writes what `store_scaled` (product.py) writes.
    """
    COUNT: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1]
    start, row, inside = tile_rows(first, tokens, sums)
    own = gl.arange(0, COLUMNS, gl.SliceLayout(0, sums.type.layout))
    base = start * OUT + column
    at = row[:, None] * OUT + own[None, :]
    if residual is not None:
        sums += gl.load(residual + base + at, mask=inside, other=0.0)
    gl.store(y + base + at, sums, mask=inside)
    if norm is not None:
        weight = gl.load(norm + column + own)
        gl.store(scaled + base + at, (sums * weight[None, :]).to(scaled.dtype.element_ty), mask=inside)
        even, odd = gl.split(gl.reshape(sums, (COUNT, COLUMNS // 2, 2)))
        of_groups = sums_of_neighbours(gl.fma(even, even, odd * odd), GROUP // 2)
        start, row, inside = tile_rows(first, tokens, of_groups)
        group = gl.arange(0, COLUMNS // GROUP, gl.SliceLayout(0, of_groups.type.layout))
        base = start * (OUT // GROUP) + column // GROUP
        gl.store(squares + base + (row[:, None] * (OUT // GROUP) + group[None, :]), of_groups, mask=inside)


@gluon.jit
def store_gated(gate, up, first, column, tokens, y, OUT: gl.constexpr, ACTIVATION: gl.constexpr):
    """Write the activated gate times up to the columns of y [tokens, OUT] from `column` on."""
    start, row, inside = tile_rows(first, tokens, gate)
    own = gl.arange(0, gate.shape[1], gl.SliceLayout(0, gate.type.layout))
    activated = gated(gate, up, ACTIVATION).to(y.dtype.element_ty)
    gl.store(y + start * OUT + column + (row[:, None] * OUT + own[None, :]), activated, mask=inside)


@gluon.jit
def store_head(
    low, high, first, head, first_angle, tokens, exchange, head_norm, rotary, slots, cache, q, layer,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, STRIDE: gl.constexpr,
    ROW: gl.constexpr, EPS: gl.constexpr,
):  # fmt: skip
    """Write a head to `q` or `cache`; heads of q and k are normed and rotated before.

    `low` and `high` [COUNT, ANGLES] are the head's features from `first_angle` on, and from HEAD_DIM / 2 +
    first_angle on; the operands are as in `project_qkv` (qkv.py). If that is half of the head, `exchange` is
    how to learn about the rest: the operands `halves` and `part` of `other_half`, and the number of heads
    before this one. Otherwise it is None.
    """
    HALF: gl.constexpr = HEAD_DIM // 2
    HAS_NORM: gl.constexpr = head_norm is not None
    IN_BYTES: gl.constexpr = cache.dtype.element_ty == gl.int8
    if exchange is not None:
        halves, part, heads_before = exchange
        done = heads_before * (HAS_NORM + IN_BYTES)
    start, row, inside = tile_rows(first, tokens, low)
    own = loaded_rows(first, tokens, low.shape[0], row.type.layout)
    angle = first_angle + gl.arange(0, low.shape[1], gl.SliceLayout(0, low.type.layout))
    if HAS_NORM:
        squares = row_sums(gl.fma(low, low, high * high))
        if exchange is not None:
            squares += other_half(squares, halves, part, done)
        if head < HEADS + KV_HEADS:
            inverse = gl.rsqrt(squares / HEAD_DIM + EPS)[:, None]
            weight = head_norm + gl.where(head < HEADS, 0, HEAD_DIM) + angle
            low = low * inverse * gl.load(weight)[None, :]
            high = high * inverse * gl.load(weight + HALF)[None, :]
    if head < HEADS + KV_HEADS:
        angles = rotary + own[:, None].to(gl.int64) * HEAD_DIM + angle[None, :]
        low, high = rotated(low, high, gl.load(angles), gl.load(angles + HALF))
    if IN_BYTES:
        largest = gl.max(gl.maximum(magnitude(low), magnitude(high)), axis=1)
        if exchange is not None:
            largest = gl.maximum(largest, other_half(largest, halves, part, done + HAS_NORM))
    if head < HEADS:
        q_at = q + (start * HEADS + head) * HEAD_DIM + (row[:, None] * (HEADS * HEAD_DIM) + angle[None, :])
        gl.store(q_at, low.to(q.dtype.element_ty), mask=inside)
        gl.store(q_at + HALF, high.to(q.dtype.element_ty), mask=inside)
    else:
        plane = (head - HEADS) // KV_HEADS  # 0 keys, 1 values
        cache_row = gl.load(slots + own)[:, None] + (layer * 2 + plane) * STRIDE
        kv_head = (head - HEADS) % KV_HEADS
        if IN_BYTES:
            scale = scale_for(largest)[:, None]
            scale_at = scales_of(cache, KV_HEADS, HEAD_DIM) + cache_row * (ROW // SCALE_BYTES) + kv_head
            gl.store(scale_at, scale, mask=inside)
            stored_low = rounded(low / scale)
            stored_high = rounded(high / scale)
        else:
            stored_low = low.to(cache.dtype.element_ty)
            stored_high = high.to(cache.dtype.element_ty)
        cache_at = cache + cache_row * ROW + (kv_head * HEAD_DIM + angle)[None, :]
        gl.store(cache_at, stored_low, mask=inside)
        gl.store(cache_at + HALF, stored_high, mask=inside)


@gluon.aggregate
class Halves:
    """Where two groups of warps give each other a number for each row.

    `numbers` [4, COUNT] f32: of both groups, of every other exchange; `met`: both have written.
    """

    numbers: gl.shared_memory_descriptor
    met: gl.shared_memory_descriptor


@gluon.jit
def make_halves(COUNT: gl.constexpr):
    """Allocate the memory of exchanges of COUNT rows."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.float32, [4, COUNT], LAYOUT)
    met = mbarrier.allocate_mbarrier()
    mbarrier.init(met, count=2)
    return Halves(numbers, met)  # type: ignore[call-arg]  # the decorator makes the constructor


@gluon.jit
def other_half(own, halves, part: gl.constexpr, done):
    """Return the other group's numbers [COUNT], of 32 bits; `own` are this group's.

    `done`: exchanges before this one. A group writes over an exchange's numbers two exchanges later, when
    both have read them.
    """
    place = done % 2 * 2
    halves.numbers.index(place + part).store(own.to(gl.float32, bitcast=True))
    mbarrier.arrive(halves.met)
    mbarrier.wait(halves.met, done % 2)
    return halves.numbers.index(place + 1 - part).load(own.type.layout).to(own.dtype, bitcast=True)
