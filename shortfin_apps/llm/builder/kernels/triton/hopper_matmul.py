"""The matmuls of a layer for many tokens on Hopper, in Gluon (see hopper_product.py).

They compute what `linear` and `gated_linear` (linear.py) and `project_qkv` (qkv.py) do, with the same
operands and bits, for row-major weights in bf16 and in 8-bit floats. `scratch` i8 holds the TMA's maps of x
and w, of each workgroup; only ahead_of_time/ptx.py reads this operand. COLUMNS must divide the rows of w, and
512 must divide IN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from shortfin_apps.llm.builder.kernels.triton.hopper_product import (
    halves,
    load_tiles,
    make_ring,
    product_of_half,
    tensor_map,
    tile_at,
)
from shortfin_apps.llm.builder.kernels.triton.linear import gated
from shortfin_apps.llm.builder.kernels.triton.product import sums_of_neighbours

WARPS = gl.constexpr((4, 1))  # of the second group that multiplies, and of the loads
REGISTERS = gl.constexpr((240, 24))  # per thread of these


@gluon.jit
def linear(
    x, x_scales, in_squares, w, scales, residual, norm, y, scaled, squares, scratch, tokens,
    IN: gl.constexpr, OUT: gl.constexpr, EPS: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply x [tokens, IN] by the transpose of w [OUT, IN]: y [tokens, OUT] f32, plus any `residual`.

    With `norm` [OUT], also writes `scaled` and `squares` for the next matmul.
    """
    _multiply(
        x, x_scales, in_squares, w, scales, tokens, IN, OUT, None, EPS, GROUP, ROWS, COLUMNS, STAGES,
        _store_linear, (residual, norm, y, scaled, squares, OUT, GROUP),
    )  # fmt: skip


@gluon.jit
def gated_linear(
    x, x_scales, in_squares, w, scales, y, scratch, tokens,
    IN: gl.constexpr, OUT: gl.constexpr, EPS: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Compute y [tokens, OUT] = silu(gate) * up, from x [tokens, IN] and w [2 * OUT, IN], gate before up.

    A tile has COLUMNS / 2 columns of gate, then COLUMNS / 2 of up.
    """
    _multiply(
        x, x_scales, in_squares, w, scales, tokens, IN, 2 * OUT, OUT, EPS, GROUP, ROWS, COLUMNS, STAGES,
        _store_gated, (y, OUT, ACTIVATION),
    )  # fmt: skip


@gluon.jit
def project_qkv(
    x, x_scales, in_squares, w, scales, rotary, slots, cache, q, scratch, tokens, layer,
    IN: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    STRIDE: gl.constexpr, ROW: gl.constexpr, EPS: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Project x [tokens, IN]; write the rotated q [tokens, HEADS * HEAD_DIM], and k and v to `cache`.

    The operands are as in `project_qkv` in qkv.py, without a bias and norms of heads, and with a cache in
    floats. A tile has one head or two.
    """
    OUT: gl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    _multiply(
        x, x_scales, in_squares, w, scales, tokens, IN, OUT, None, EPS, GROUP, ROWS, COLUMNS, STAGES,
        _store_heads, (rotary, slots, cache, q, layer, HEADS, KV_HEADS, HEAD_DIM, STRIDE, ROW),
    )  # fmt: skip


@gluon.jit
def _multiply(
    x, x_scales, in_squares, w, scales, tokens,
    IN: gl.constexpr, W_ROWS: gl.constexpr, SECOND_HALF: gl.constexpr, EPS: gl.constexpr,
    GROUP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    STORE: gl.constexpr, operands,
):  # fmt: skip
    """Multiply x [tokens, IN] by the transpose of w [W_ROWS, IN]; STORE writes the tiles.

    SECOND_HALF: see `load_tiles`. STORE is called with the results of `product_of_half`, the index of the
    tile of columns, the halves' first rows of w, `tokens` and the `operands`.
    """
    x_map = tensor_map(x, tokens, IN, ROWS)
    w_map = tensor_map(w, W_ROWS, IN, COLUMNS if SECOND_HALF is None else COLUMNS // 2)
    ring = make_ring(x_map, w_map, COLUMNS, STAGES)
    gl.warp_specialize(
        [
            (_multiply_half, (
                ring, 0, x_scales, in_squares, scales, tokens, IN, W_ROWS, SECOND_HALF, EPS, GROUP,
                STORE, operands,
            )),
            (_multiply_half, (
                ring, 1, x_scales, in_squares, scales, tokens, IN, W_ROWS, SECOND_HALF, EPS, GROUP,
                STORE, operands,
            )),
            (load_tiles, (ring, x_map, w_map, tokens, IN, W_ROWS // COLUMNS, SECOND_HALF)),
        ],
        WARPS, REGISTERS,
    )  # fmt: skip


@gluon.jit
def _multiply_half(
    ring, part, x_scales, in_squares, scales, tokens,
    IN: gl.constexpr, W_ROWS: gl.constexpr, SECOND_HALF: gl.constexpr, EPS: gl.constexpr,
    GROUP: gl.constexpr, STORE: gl.constexpr, operands,
):  # fmt: skip
    """Compute half `part` of the rows of every tile of the workgroup; run by four warps."""
    COLUMNS: gl.constexpr = ring.ws.shape[1]
    HALF: gl.constexpr = COLUMNS // 2
    row_tiles = gl.cdiv(tokens, ring.xs.shape[1])
    step = 0
    for tile in range(gl.program_id(0), row_tiles * (W_ROWS // COLUMNS), gl.num_programs(0)):
        row_tile, column_tile = tile_at(tile, row_tiles, W_ROWS // COLUMNS)
        if SECOND_HALF is None:
            low_first = column_tile * COLUMNS
            high_first = low_first + HALF
        else:
            low_first = column_tile * HALF
            high_first = SECOND_HALF + low_first
        low, high, row = product_of_half(
            ring, step, part, row_tile, tokens, x_scales, in_squares, scales, low_first, high_first,
            IN, EPS, GROUP,
        )  # fmt: skip
        step += IN // ring.xs.shape[2]
        STORE(low, high, row, column_tile, low_first, high_first, tokens, *operands)


@gluon.jit
def _store_linear(
    low, high, row, column_tile, low_first, high_first, tokens, residual, norm, y, scaled, squares,
    OUT: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Write a tile's columns of y, and with `norm` what `store_scaled` (product.py) writes."""
    _store_columns(low, residual, norm, y, scaled, squares, row, low_first, tokens, OUT, GROUP)
    _store_columns(high, residual, norm, y, scaled, squares, row, high_first, tokens, OUT, GROUP)


@gluon.jit
def _store_columns(
    sums, residual, norm, y, scaled, squares, row, first, tokens, OUT: gl.constexpr, GROUP: gl.constexpr
):
    """Write the columns of y, `scaled` and `squares` from `first` on."""
    COLUMNS: gl.constexpr = sums.shape[1]
    column = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, sums.type.layout))
    at = row[:, None].to(gl.int64) * OUT + column[None, :]
    inside = (row < tokens)[:, None]
    if residual is not None:
        sums += gl.load(residual + at, mask=inside, other=0.0)
    gl.store(y + at, sums, mask=inside)
    if norm is not None:
        weight = gl.load(norm + column)
        gl.store(scaled + at, (sums * weight[None, :]).to(scaled.dtype.element_ty), mask=inside)
        even, odd = gl.split(gl.reshape(sums, (sums.shape[0], COLUMNS // 2, 2)))
        of_groups = sums_of_neighbours(gl.fma(even, even, odd * odd), GROUP // 2)
        GROUPS: gl.constexpr = of_groups.type.layout
        group = first // GROUP + gl.arange(0, COLUMNS // GROUP, gl.SliceLayout(0, GROUPS))
        of_row = gl.convert_layout(row, gl.SliceLayout(1, GROUPS))
        at = squares + of_row[:, None].to(gl.int64) * (OUT // GROUP) + group[None, :]
        gl.store(at, of_groups, mask=(of_row < tokens)[:, None])


@gluon.jit
def _store_gated(
    gate, up, row, column_tile, first, up_first, tokens, y, OUT: gl.constexpr, ACTIVATION: gl.constexpr
):
    """Write silu(gate) * up to a tile's columns of y."""
    HALF: gl.constexpr = gate.shape[1]
    column = first + gl.arange(0, HALF, gl.SliceLayout(0, gate.type.layout))
    at = row[:, None].to(gl.int64) * OUT + column[None, :]
    activated = gated(gate, up, ACTIVATION).to(y.dtype.element_ty)
    gl.store(y + at, activated, mask=(row < tokens)[:, None])


@gluon.jit
def _store_heads(
    low, high, row, column_tile, low_first, high_first, tokens, rotary, slots, cache, q, layer,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, STRIDE: gl.constexpr,
    ROW: gl.constexpr,
):  # fmt: skip
    """Rotate and write the one or two heads of a tile."""
    if 2 * low.shape[1] == HEAD_DIM:
        _store_head(
            low, high, rotary, slots, cache, q, row, column_tile, tokens, layer,
            HEADS, KV_HEADS, HEAD_DIM, STRIDE, ROW,
        )  # fmt: skip
    else:
        gl.static_assert(low.shape[1] == HEAD_DIM)
        first_low, first_high = halves(low, HEAD_DIM // 2)
        second_low, second_high = halves(high, HEAD_DIM // 2)
        row = gl.convert_layout(row, gl.SliceLayout(1, first_low.type.layout))
        _store_head(
            first_low, first_high, rotary, slots, cache, q, row, column_tile * 2, tokens, layer,
            HEADS, KV_HEADS, HEAD_DIM, STRIDE, ROW,
        )  # fmt: skip
        _store_head(
            second_low, second_high, rotary, slots, cache, q, row, column_tile * 2 + 1, tokens, layer,
            HEADS, KV_HEADS, HEAD_DIM, STRIDE, ROW,
        )  # fmt: skip


@gluon.jit
def _store_head(
    low, high, rotary, slots, cache, q, row, head, tokens, layer,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, STRIDE: gl.constexpr,
    ROW: gl.constexpr,
):  # fmt: skip
    """Rotate one head of q or k, given as halves [ROWS / 2, HEAD_DIM / 2]; write it to `q` or `cache`."""
    HALF: gl.constexpr = HEAD_DIM // 2
    own = gl.minimum(row, tokens - 1)
    angle = gl.arange(0, HALF, gl.SliceLayout(0, low.type.layout))
    inside = (row < tokens)[:, None]
    if head < HEADS + KV_HEADS:
        angles = rotary + own[:, None].to(gl.int64) * HEAD_DIM + angle[None, :]
        cosine = gl.load(angles)
        sine = gl.load(angles + HALF)
        turned = low * cosine - high * sine
        high = high * cosine + low * sine
        low = turned
    if head < HEADS:
        at = q + own[:, None].to(gl.int64) * (HEADS * HEAD_DIM) + (head * HEAD_DIM + angle)[None, :]
        gl.store(at, low.to(q.dtype.element_ty), mask=inside)
        gl.store(at + HALF, high.to(q.dtype.element_ty), mask=inside)
    else:
        plane = (head - HEADS) // KV_HEADS  # 0 keys, 1 values
        cache_row = gl.load(slots + own)[:, None] + (layer * 2 + plane) * STRIDE
        at = cache + cache_row * ROW + ((head - HEADS) % KV_HEADS * HEAD_DIM + angle)[None, :]
        gl.store(at, low.to(cache.dtype.element_ty), mask=inside)
        gl.store(at + HALF, high.to(cache.dtype.element_ty), mask=inside)
