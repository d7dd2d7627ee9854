"""The matmuls of a layer for many tokens on Hopper, with weights in blocks, in Gluon (see hopper_blocks.py).

They compute what `linear` and `gated_linear` (linear.py) and `project_qkv` (qkv.py) do, with the same
operands and bits, for blocks with terms in bf16. `scratch` i8 holds the TMA's maps of each workgroup; only
ahead_of_time/ptx.py reads this operand. TILE must divide the rows of w, and UNROLLED * DEPTH divide IN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from shortfin_apps.llm.builder.kernels.triton.hopper_blocks import (
    DEPTH,
    HALF,
    TERMS,
    TILE,
    load_tiles,
    make_ring,
    pairs_map,
    product_of_half,
    x_map_of,
)
from shortfin_apps.llm.builder.kernels.triton.hopper_product import inverse_rms, tile_at
from shortfin_apps.llm.builder.kernels.triton.linear import gated
from shortfin_apps.llm.builder.kernels.triton.product import sums_of_neighbours

WARPS = gl.constexpr((4, 1))  # of the second group that multiplies, and of the loads


@gluon.jit
def linear(
    x, in_squares, w, scales, minima, residual, norm, y, scaled, squares, scratch, tokens,
    IN: gl.constexpr, OUT: gl.constexpr, EPS: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply x [tokens, IN] by the transpose of w [OUT, IN]: y [tokens, OUT] f32, plus any `residual`.

    With `norm` [OUT], also writes `scaled` and `squares` for the next matmul.
    """
    _multiply(
        x, in_squares, w, scales, minima, tokens, OUT // TILE, (TILE, 16, 1, 2),
        IN, EPS, GROUP, BLOCKS, TOKENS, STAGES,
        _store_linear, (residual, norm, y, scaled, squares, OUT, GROUP),
    )  # fmt: skip


@gluon.jit
def gated_linear(
    x, in_squares, w, scales, minima, y, scratch, tokens,
    IN: gl.constexpr, OUT: gl.constexpr, EPS: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Compute y [tokens, OUT] = silu(gate) * up, from x [tokens, IN] and w [2 * OUT, IN], gate before up."""
    _multiply(
        x, in_squares, w, scales, minima, tokens, 2 * OUT // TILE, (TILE // 2, 8, OUT, 1),
        IN, EPS, GROUP, BLOCKS, TOKENS, STAGES,
        _store_gated, (y, OUT, ACTIVATION),
    )  # fmt: skip


@gluon.jit
def project_qkv(
    x, in_squares, w, scales, minima, rotary, slots, cache, q, scratch, tokens, layer,
    IN: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    STRIDE: gl.constexpr, ROW: gl.constexpr, EPS: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Project x [tokens, IN]; write the rotated q [tokens, HEADS * HEAD_DIM], and k and v to `cache`.

    The operands are as in `project_qkv` in qkv.py, without a bias and norms of heads, and with a cache in
    floats. A tile has one head.
    """
    gl.static_assert(HEAD_DIM == TILE)
    _multiply(
        x, in_squares, w, scales, minima, tokens, HEADS + 2 * KV_HEADS, (TILE, 8, TILE // 2, 1),
        IN, EPS, GROUP, BLOCKS, TOKENS, STAGES,
        _store_head, (rotary, slots, cache, q, layer, HEADS, KV_HEADS, STRIDE, ROW),
    )  # fmt: skip


@gluon.jit
def _multiply(
    x, in_squares, w, scales, minima, tokens, TILES: gl.constexpr, PAIRS: gl.constexpr,
    IN: gl.constexpr, EPS: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, STORE: gl.constexpr, operands,
):  # fmt: skip
    """Multiply x [tokens, IN] by the transpose of w [TILES * TILE, IN]; STORE writes the tiles.

    PAIRS: see hopper_blocks.py. STORE is called with the results of `product_of_half`, the index of the rows'
    tile, of the tile of w and of its half, `tokens` and the `operands`.
    """
    HAS_MINIMA: gl.constexpr = minima is not None
    SIZE: gl.constexpr = BLOCKS[1]
    x_map = x_map_of(x, tokens, IN, TOKENS)
    # Two bytes of w at a time, as a thread needs them.
    packed = w.to(gl.pointer_type(gl.int16), bitcast=True)
    w_map = pairs_map(packed, TILES, PAIRS, IN * BLOCKS[0] // 16, DEPTH * BLOCKS[0] // 16)
    scale_map = pairs_map(scales, TILES, PAIRS, IN // SIZE, TERMS)
    least_map = scale_map
    if HAS_MINIMA:
        least_map = pairs_map(minima, TILES, PAIRS, IN // SIZE, TERMS)
    ring = make_ring(x_map, w_map, scale_map, HAS_MINIMA, STAGES)
    gl.warp_specialize(
        [
            (_multiply_half, (
                ring, 0, in_squares, tokens, TILES, IN, EPS, GROUP, HAS_MINIMA, SIZE, STORE, operands,
            )),
            (_multiply_half, (
                ring, 1, in_squares, tokens, TILES, IN, EPS, GROUP, HAS_MINIMA, SIZE, STORE, operands,
            )),
            (load_tiles, (ring, x_map, w_map, scale_map, least_map, tokens, IN, TILES, HAS_MINIMA, SIZE)),
        ],
        WARPS,
    )  # fmt: skip


@gluon.jit
def _multiply_half(
    ring, part: gl.constexpr, in_squares, tokens, TILES: gl.constexpr, IN: gl.constexpr, EPS: gl.constexpr,
    GROUP: gl.constexpr, HAS_MINIMA: gl.constexpr, SIZE: gl.constexpr, STORE: gl.constexpr, operands,
):  # fmt: skip
    """Compute half `part` of the rows of w of every tile of the workgroup; run by four warps."""
    TOKENS: gl.constexpr = ring.xs.shape[1]
    row_tiles = gl.cdiv(tokens, TOKENS)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * TILES, gl.num_programs(0)):
        row_tile, column_tile = tile_at(tile, row_tiles, TILES)
        first, second = product_of_half(ring, step, part, IN, HAS_MINIMA, SIZE)
        step += IN // DEPTH
        if in_squares is not None:
            row = row_tile * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, first.type.layout))
            inverse = inverse_rms(in_squares, gl.minimum(row, tokens - 1), IN, GROUP, EPS)
            first = first * inverse[:, None]
            second = second * inverse[:, None]
        STORE(first, second, row_tile, column_tile, part, tokens, *operands)


@gluon.jit
def _rows(row_tile, tokens, x):
    """Return the first row of x's tile, the rows' indices in the tile, and whether a row exists [TOKENS, 1].

    Addresses are those of the tile's first row plus 32-bit offsets: 64-bit ones would not fit in registers.
    """
    TOKENS: gl.constexpr = x.shape[0]
    row = gl.arange(0, TOKENS, gl.SliceLayout(1, x.type.layout))
    return (row_tile * TOKENS).to(gl.int64), row, (row < tokens - row_tile * TOKENS)[:, None]


@gluon.jit
def _store_linear(
    even, odd, row_tile, column_tile, part: gl.constexpr, tokens, residual, norm, y, scaled, squares,
    OUT: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Write a tile's columns of y, and with `norm` what `store_scaled` (product.py) writes."""
    TOKENS: gl.constexpr = even.shape[0]
    sums = gl.reshape(gl.join(even, odd), (TOKENS, HALF))
    first_row, row, inside = _rows(row_tile, tokens, sums)
    first = column_tile * TILE + part * HALF
    column = gl.arange(0, HALF, gl.SliceLayout(0, sums.type.layout))
    start = first_row * OUT + first
    at = row[:, None] * OUT + column[None, :]
    if residual is not None:
        sums += gl.load(residual + start + at, mask=inside, other=0.0)
    gl.store(y + start + at, sums, mask=inside)
    if norm is not None:
        weight = gl.load(norm + first + column)
        gl.store(scaled + start + at, (sums * weight[None, :]).to(scaled.dtype.element_ty), mask=inside)
        even, odd = gl.split(gl.reshape(sums, (TOKENS, HALF // 2, 2)))
        of_groups = sums_of_neighbours(gl.fma(even, even, odd * odd), GROUP // 2)
        first_row, row, inside = _rows(row_tile, tokens, of_groups)
        group = gl.arange(0, HALF // GROUP, gl.SliceLayout(0, of_groups.type.layout))
        start = first_row * (OUT // GROUP) + first // GROUP
        gl.store(squares + start + (row[:, None] * (OUT // GROUP) + group[None, :]), of_groups, mask=inside)


@gluon.jit
def _store_gated(
    gate, up, row_tile, column_tile, part: gl.constexpr, tokens, y, OUT: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Write silu(gate) * up to a tile's columns of y."""
    COUNT: gl.constexpr = gate.shape[1]
    first_row, row, inside = _rows(row_tile, tokens, gate)
    column = gl.arange(0, COUNT, gl.SliceLayout(0, gate.type.layout))
    start = first_row * OUT + column_tile * (2 * COUNT) + part * COUNT
    activated = gated(gate, up, ACTIVATION).to(y.dtype.element_ty)
    gl.store(y + start + (row[:, None] * OUT + column[None, :]), activated, mask=inside)


@gluon.jit
def _store_head(
    low, high, row_tile, head, part: gl.constexpr, tokens, rotary, slots, cache, q, layer,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, STRIDE: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """Rotate half of a head of q or k, given as halves of features; write it to `q` or `cache`."""
    COUNT: gl.constexpr = low.shape[1]
    first_row, row, inside = _rows(row_tile, tokens, low)
    own = gl.minimum(first_row.to(gl.int32) + row, tokens - 1)
    angle = part * COUNT + gl.arange(0, COUNT, gl.SliceLayout(0, low.type.layout))
    if head < HEADS + KV_HEADS:
        angles = rotary + own[:, None].to(gl.int64) * TILE + angle[None, :]
        cosine = gl.load(angles)
        sine = gl.load(angles + TILE // 2)
        turned = low * cosine - high * sine
        high = high * cosine + low * sine
        low = turned
    if head < HEADS:
        at = q + (first_row * HEADS + head) * TILE + (row[:, None] * (HEADS * TILE) + angle[None, :])
        gl.store(at, low.to(q.dtype.element_ty), mask=inside)
        gl.store(at + TILE // 2, high.to(q.dtype.element_ty), mask=inside)
    else:
        plane = (head - HEADS) // KV_HEADS  # 0 keys, 1 values
        cache_row = gl.load(slots + own)[:, None] + (layer * 2 + plane) * STRIDE
        at = cache + cache_row * ROW + ((head - HEADS) % KV_HEADS * TILE + angle)[None, :]
        gl.store(at, low.to(cache.dtype.element_ty), mask=inside)
        gl.store(at + TILE // 2, high.to(cache.dtype.element_ty), mask=inside)
