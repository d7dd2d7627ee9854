"""The matmuls of a layer for many tokens on Hopper, in Gluon (see hopper_product.py).

They compute what `linear` and `gated_linear` (linear.py) and `project_qkv` (qkv.py) do, with the same
operands and bits, for row-major weights in bf16 and in 8-bit floats. `scratch` i8 holds the TMA's maps of x
and w, of each workgroup; only ahead_of_time/ptx.py reads this operand. COLUMNS must divide the rows of w, and
a buffer's depth (DEPTH_BITS) must divide IN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from shortfin_apps.llm.builder.kernels.triton.hopper_epilogues import store_columns, store_gated, store_head
from shortfin_apps.llm.builder.kernels.triton.hopper_product import (
    DEPTH_BITS,
    halves,
    load_tiles,
    make_ring,
    product_of_half,
    tensor_map,
    tile_at,
)

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
        x, x_scales, in_squares, w, scales, None, tokens, IN, OUT, None, EPS, GROUP, ROWS, COLUMNS, STAGES,
        _store_linear, (residual, norm, y, scaled, squares, OUT, GROUP),
    )  # fmt: skip


@gluon.jit
def gated_linear(
    x, x_scales, in_squares, w, scales, y, scratch, tokens,
    IN: gl.constexpr, OUT: gl.constexpr, EPS: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Compute y [tokens, OUT] = ACTIVATION(gate) * up, from x [tokens, IN] and w [2 * OUT, IN]: gate, up.

    A tile has COLUMNS / 2 columns of gate, then COLUMNS / 2 of up.
    """
    _multiply(
        x, x_scales, in_squares, w, scales, None, tokens, IN, 2 * OUT, OUT, EPS, GROUP, ROWS, COLUMNS, STAGES,
        _store_gated, (y, OUT, ACTIVATION),
    )  # fmt: skip


@gluon.jit
def project_qkv(
    x, x_scales, in_squares, w, scales, bias, head_norm, rotary, slots, cache, q, scratch, tokens, layer,
    IN: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    STRIDE: gl.constexpr, ROW: gl.constexpr, EPS: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Project x [tokens, IN]; write the rotated q [tokens, HEADS * HEAD_DIM], and k and v to `cache`.

    The operands are as in `project_qkv` in qkv.py. A tile has one head or two.
    """
    OUT: gl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    of_heads = head_norm, rotary, slots, cache, q, layer, HEADS, KV_HEADS, HEAD_DIM, STRIDE, ROW, EPS
    _multiply(
        x, x_scales, in_squares, w, scales, bias, tokens, IN, OUT, None, EPS, GROUP, ROWS, COLUMNS, STAGES,
        _store_heads, (HEAD_DIM, of_heads),
    )  # fmt: skip


@gluon.jit
def _multiply(
    x, x_scales, in_squares, w, scales, bias, tokens,
    IN: gl.constexpr, W_ROWS: gl.constexpr, SECOND_HALF: gl.constexpr, EPS: gl.constexpr,
    GROUP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    STORE: gl.constexpr, operands,
):  # fmt: skip
    """Multiply x [tokens, IN] by the transpose of w [W_ROWS, IN]; STORE writes the tiles.

    SECOND_HALF: see `load_tiles`. STORE is called with the results of `product_of_half`, the first row of x,
    the index of the tile of columns, `tokens` and the `operands`.
    """
    DEPTH: gl.constexpr = DEPTH_BITS // x.dtype.element_ty.primitive_bitwidth
    x_map = tensor_map(x, tokens, IN, ROWS // 2, DEPTH)
    w_map = tensor_map(w, W_ROWS, IN, COLUMNS if SECOND_HALF is None else COLUMNS // 2, DEPTH)
    ring = make_ring(x_map, w_map, COLUMNS, STAGES)
    gl.warp_specialize(
        [
            (_multiply_half, (
                ring, 0, x_scales, in_squares, scales, bias, tokens, IN, W_ROWS, SECOND_HALF, EPS, GROUP,
                STORE, operands,
            )),
            (_multiply_half, (
                ring, 1, x_scales, in_squares, scales, bias, tokens, IN, W_ROWS, SECOND_HALF, EPS, GROUP,
                STORE, operands,
            )),
            (load_tiles, (ring, x_map, w_map, tokens, IN, W_ROWS // COLUMNS, SECOND_HALF)),
        ],
        WARPS, REGISTERS,
    )  # fmt: skip


@gluon.jit
def _multiply_half(
    ring, part, x_scales, in_squares, scales, bias, tokens,
    IN: gl.constexpr, W_ROWS: gl.constexpr, SECOND_HALF: gl.constexpr, EPS: gl.constexpr,
    GROUP: gl.constexpr, STORE: gl.constexpr, operands,
):  # fmt: skip
    """Compute half `part` of the rows of every tile of the workgroup; run by four warps."""
    COLUMNS: gl.constexpr = ring.ws.shape[1]
    HALF: gl.constexpr = COLUMNS // 2
    ROWS: gl.constexpr = ring.xs.shape[1]
    row_tiles = gl.cdiv(tokens, ROWS)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * (W_ROWS // COLUMNS), gl.num_programs(0)):
        row_tile, column_tile = tile_at(tile, row_tiles, W_ROWS // COLUMNS)
        if SECOND_HALF is None:
            low_first = column_tile * COLUMNS
            high_first = low_first + HALF
        else:
            low_first = column_tile * HALF
            high_first = SECOND_HALF + low_first
        first_row = row_tile * ROWS + part * (ROWS // 2)
        low, high = product_of_half(
            ring, step, part, first_row, tokens, x_scales, in_squares, scales, bias, low_first, high_first,
            IN, EPS, GROUP,
        )  # fmt: skip
        step += IN // ring.xs.shape[2]
        STORE(low, high, first_row, column_tile, tokens, *operands)


@gluon.jit
def _store_linear(
    low, high, first_row, column_tile, tokens, residual, norm, y, scaled, squares,
    OUT: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Write a tile's columns of y, and with `norm` of `scaled` and `squares`."""
    HALF: gl.constexpr = low.shape[1]
    column = column_tile * (2 * HALF)
    store_columns(low, first_row, column, tokens, residual, norm, y, scaled, squares, OUT, GROUP)
    store_columns(high, first_row, column + HALF, tokens, residual, norm, y, scaled, squares, OUT, GROUP)


@gluon.jit
def _store_gated(gate, up, first_row, column_tile, tokens, y, OUT: gl.constexpr, ACTIVATION: gl.constexpr):
    """Write a tile's columns of y."""
    store_gated(gate, up, first_row, column_tile * gate.shape[1], tokens, y, OUT, ACTIVATION)


@gluon.jit
def _store_heads(low, high, first_row, column_tile, tokens, HEAD_DIM: gl.constexpr, operands):
    """Write the one or two heads of a tile; `operands` are the remaining ones of `store_head`."""
    if 2 * low.shape[1] == HEAD_DIM:
        store_head(low, high, first_row, column_tile, 0, tokens, None, *operands)
    else:
        gl.static_assert(low.shape[1] == HEAD_DIM)
        first_low, first_high = halves(low, HEAD_DIM // 2)
        second_low, second_high = halves(high, HEAD_DIM // 2)
        store_head(first_low, first_high, first_row, column_tile * 2, 0, tokens, None, *operands)
        store_head(second_low, second_high, first_row, column_tile * 2 + 1, 0, tokens, None, *operands)
