"""The matmuls of a layer for many tokens on Hopper, with weights in blocks, in Gluon (see hopper_blocks.py).

They compute what `linear` and `gated_linear` (linear.py) and `project_qkv` (qkv.py) do, with the same
operands and bits, for blocks with terms in bf16. `scratch` i8 holds the TMA's maps of each workgroup; only
ahead_of_time/ptx.py reads this operand. TILE must divide the rows of w, and 2 * DEPTH divide IN.
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
)
from shortfin_apps.llm.builder.kernels.triton.hopper_epilogues import (
    make_halves,
    store_columns,
    store_gated,
    store_head,
)
from shortfin_apps.llm.builder.kernels.triton.hopper_product import (
    inverse_rms,
    loaded_rows,
    tensor_map,
    tile_at,
)

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
    """Compute y [tokens, OUT] = ACTIVATION(gate) * up, from x [tokens, IN] and w [2 * OUT, IN]: gate, up."""
    _multiply(
        x, in_squares, w, scales, minima, tokens, 2 * OUT // TILE, (TILE // 2, 8, OUT, 1),
        IN, EPS, GROUP, BLOCKS, TOKENS, STAGES,
        _store_gated, (y, OUT, ACTIVATION),
    )  # fmt: skip


@gluon.jit
def project_qkv(
    x, in_squares, w, scales, minima, bias, head_norm, rotary, slots, cache, q, scratch, tokens, layer,
    IN: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    STRIDE: gl.constexpr, ROW: gl.constexpr, EPS: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Project x [tokens, IN]; write the rotated q [tokens, HEADS * HEAD_DIM], and k and v to `cache`.

    The operands are as in `project_qkv` in qkv.py. A tile has one head.
    """
    gl.static_assert(HEAD_DIM == TILE)
    of_heads = head_norm, rotary, slots, cache, q, layer, HEADS, KV_HEADS, HEAD_DIM, STRIDE, ROW, EPS
    _multiply(
        x, in_squares, w, scales, minima, tokens, HEADS + 2 * KV_HEADS, (TILE, 8, TILE // 2, 1),
        IN, EPS, GROUP, BLOCKS, TOKENS, STAGES,
        _store_head, (bias, make_halves(TOKENS), of_heads),
    )  # fmt: skip


@gluon.jit
def _multiply(
    x, in_squares, w, scales, minima, tokens, TILES: gl.constexpr, PAIRS: gl.constexpr,
    IN: gl.constexpr, EPS: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, STORE: gl.constexpr, operands,
):  # fmt: skip
    """Multiply x [tokens, IN] by the transpose of w [TILES * TILE, IN]; STORE writes the tiles.

    PAIRS: see hopper_blocks.py. STORE is called with the results of `product_of_half`, the first row of x,
    the index of the tile of w and of its half, how many tiles were before, `tokens` and the `operands`.
    """
    HAS_MINIMA: gl.constexpr = minima is not None
    SIZE: gl.constexpr = BLOCKS[1]
    x_map = tensor_map(x, tokens, IN, TOKENS, DEPTH)
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
            own = loaded_rows(row_tile * TOKENS, tokens, TOKENS, gl.SliceLayout(1, first.type.layout))
            inverse = inverse_rms(in_squares, own, IN, GROUP, EPS)
            first = first * inverse[:, None]
            second = second * inverse[:, None]
        turn = step // (IN // DEPTH) - 1
        STORE(first, second, row_tile * TOKENS, column_tile, part, turn, tokens, *operands)


@gluon.jit
def _store_linear(
    even, odd, first_row, column_tile, part: gl.constexpr, turn, tokens, residual, norm, y, scaled, squares,
    OUT: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Write a tile's columns of y, and with `norm` of `scaled` and `squares`."""
    sums = gl.reshape(gl.join(even, odd), (even.shape[0], HALF))
    column = column_tile * TILE + part * HALF
    store_columns(sums, first_row, column, tokens, residual, norm, y, scaled, squares, OUT, GROUP)


@gluon.jit
def _store_gated(
    gate, up, first_row, column_tile, part: gl.constexpr, turn, tokens, y, OUT: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Write a tile's columns of y."""
    COUNT: gl.constexpr = gate.shape[1]
    store_gated(gate, up, first_row, column_tile * (2 * COUNT) + part * COUNT, tokens, y, OUT, ACTIVATION)


@gluon.jit
def _store_head(low, high, first_row, head, part: gl.constexpr, turn, tokens, bias, halves, operands):
    """Write half of a head; `operands` are the remaining ones of `store_head`."""
    COUNT: gl.constexpr = low.shape[1]
    if bias is not None:
        first = bias + head * TILE + part * COUNT + gl.arange(0, COUNT, gl.SliceLayout(0, low.type.layout))
        low += gl.load(first)[None, :]
        high += gl.load(first + TILE // 2)[None, :]
    store_head(low, high, first_row, head, part * COUNT, tokens, (halves, part, turn), *operands)
