"""Candidates for the matmuls of prefills on Hopper, in Gluon: loads by TMA, warps with roles, persistent workgroups.

A workgroup has two warp groups that multiply, each with half of a tile's rows, and a warp that loads. The operands
are those of kernels/triton/linear.py and qkv.py, and `scratch`, in which each workgroup builds its tensor maps.
K is added in the order of those kernels.
"""

# ruff: noqa
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

FP8_GROUP = gl.constexpr(128)


@gluon.jit
def tile_at(tile, row_tiles, column_tiles, GROUP_ROWS: gl.constexpr):
    """Return the row and column of a tile, in groups of rows of tiles, so that neighbours share operands in L2."""
    in_group = GROUP_ROWS * column_tiles
    first = tile // in_group * GROUP_ROWS
    rows = gl.minimum(row_tiles - first, GROUP_ROWS)
    inside = tile % in_group
    return first + inside % rows, inside // rows


@gluon.jit
def load_tiles(
    x_map, w_map, xs, ws, full, empty, tokens,
    IN: gl.constexpr, COLUMN_TILES: gl.constexpr, UP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, GROUP_ROWS: gl.constexpr,
):  # fmt: skip
    """Load the tiles of x and w along K, for every tile of the workgroup."""
    row_tiles = gl.cdiv(tokens, ROWS)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * COLUMN_TILES, gl.num_programs(0)):
        row_tile, column_tile = tile_at(tile, row_tiles, COLUMN_TILES, GROUP_ROWS)
        for k in range(0, IN, DEPTH):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            ready = full.index(slot)
            mbarrier.expect(
                ready, (x_map.nbytes_per_cta + w_map.nbytes_per_cta * (COLUMNS // w_map.block_shape[0]))
            )
            tma.async_load(x_map, [row_tile * ROWS, k], ready, xs.index(slot))
            if UP == 0:
                tma.async_load(w_map, [column_tile * COLUMNS, k], ready, ws.index(slot))
            else:
                HALF: gl.constexpr = COLUMNS // 2
                tma.async_load(w_map, [column_tile * HALF, k], ready, ws.index(slot).slice(0, HALF))
                tma.async_load(w_map, [UP + column_tile * HALF, k], ready, ws.index(slot).slice(HALF, HALF))
            step += 1


@gluon.jit
def float_sums(
    xs, ws, full, empty, step, part, SUMS: gl.constexpr,
    IN: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return the sums [ROWS / 2, COLUMNS] of a tile's half `part`; the buffers start with step `step`."""
    HALF: gl.constexpr = ROWS // 2
    sums = warpgroup_mma_init(gl.zeros((HALF, COLUMNS), gl.float32, SUMS))
    # The first step is apart, so that each later step can release the buffers of the step before.
    slot = step % STAGES
    mbarrier.wait(full.index(slot), step // STAGES & 1)
    sums = warpgroup_mma(
        xs.index(slot).slice(part * HALF, HALF),
        ws.index(slot).permute((1, 0)),
        sums,
        use_acc=False,
        is_async=True,
    )
    for k in range(DEPTH, IN, DEPTH):
        step += 1
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        sums = warpgroup_mma(
            xs.index(slot).slice(part * HALF, HALF), ws.index(slot).permute((1, 0)), sums, is_async=True
        )
        sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
        mbarrier.arrive(empty.index((step - 1) % STAGES))
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(empty.index(step % STAGES))
    return sums


@gluon.jit
def start_fp8(xs, ws, slot, part, first, SUMS: gl.constexpr, HALF: gl.constexpr, COLUMNS: gl.constexpr):
    """Start the product of one group of K, for COLUMNS from `first` on."""
    zeros = warpgroup_mma_init(gl.zeros((HALF, COLUMNS), gl.float32, SUMS))
    columns = ws.index(slot).slice(first, COLUMNS).permute((1, 0))
    return warpgroup_mma(
        xs.index(slot).slice(part * HALF, HALF), columns, zeros, use_acc=False, is_async=True
    )


@gluon.jit
def scaled_sum(product, scale, sums):
    return gl.fma(product, scale[:, None].broadcast_to(product.shape), sums)


@gluon.jit
def fp8_sums(
    xs, ws, full, empty, step, part, x_scales, SUMS: gl.constexpr, PAIRED: gl.constexpr,
    IN: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return the sums of products of groups of K, each times the scales of x; `x_scales` points to the rows' first.

    PAIRED: start the product of the second group of two before the first is added.
    """
    HALF: gl.constexpr = ROWS // 2
    sums = gl.zeros((HALF, COLUMNS), gl.float32, SUMS)
    if PAIRED:
        for k in range(0, IN, 2 * DEPTH):
            scale = gl.load(x_scales + k // DEPTH)
            second_scale = gl.load(x_scales + k // DEPTH + 1)
            mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
            first = start_fp8(xs, ws, step % STAGES, part, 0, SUMS, HALF, COLUMNS)
            step += 1
            mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
            second = start_fp8(xs, ws, step % STAGES, part, 0, SUMS, HALF, COLUMNS)
            product = warpgroup_mma_wait(1, deps=[first])
            mbarrier.arrive(empty.index((step - 1) % STAGES))
            sums = scaled_sum(product, scale, sums)
            product = warpgroup_mma_wait(0, deps=[second])
            mbarrier.arrive(empty.index(step % STAGES))
            sums = scaled_sum(product, second_scale, sums)
            step += 1
    else:
        for k in range(0, IN, DEPTH):
            scale = gl.load(x_scales + k // DEPTH)
            slot = step % STAGES
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            product = start_fp8(xs, ws, slot, part, 0, SUMS, HALF, COLUMNS)
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(slot))
            sums = scaled_sum(product, scale, sums)
            step += 1
    return sums


@gluon.jit
def wide_fp8_sums(
    xs, ws, full, empty, step, part, x_scales, SUMS: gl.constexpr,
    IN: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return the sums of the first and the second half of the columns; the product of one half is in registers."""
    HALF: gl.constexpr = ROWS // 2
    WIDTH: gl.constexpr = COLUMNS // 2
    low = gl.zeros((HALF, WIDTH), gl.float32, SUMS)
    high = gl.zeros((HALF, WIDTH), gl.float32, SUMS)
    for k in range(0, IN, DEPTH):
        scale = gl.load(x_scales + k // DEPTH)
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        product = start_fp8(xs, ws, slot, part, 0, SUMS, HALF, WIDTH)
        product = warpgroup_mma_wait(0, deps=[product])
        low = scaled_sum(product, scale, low)
        product = start_fp8(xs, ws, slot, part, WIDTH, SUMS, HALF, WIDTH)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(empty.index(slot))
        high = scaled_sum(product, scale, high)
        step += 1
    return low, high


@gluon.jit
def sums_of_pairs(x, COUNT: gl.constexpr):
    """Sum COUNT neighbours in the order of `sums_of_neighbours` of product.py."""
    if COUNT == 1:
        return x
    else:
        return sums_of_pairs(gl.sum(gl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), axis=2), COUNT // 2)


@gluon.jit
def inverse_rms(in_squares, row, IN: gl.constexpr, GROUP: gl.constexpr, EPS: gl.constexpr):
    """Return the 1 / rms of a deferred norm for rows [HALF], as in `normalised_product`."""
    PARTS: gl.constexpr = 32
    GROUPS: gl.constexpr = IN // GROUP
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    OWN: gl.constexpr = row.type.layout
    own = gl.convert_layout(row, gl.SliceLayout(1, LAYOUT))
    at = (
        in_squares
        + own[:, None].to(gl.int64) * GROUPS
        + gl.arange(0, PARTS, gl.SliceLayout(0, LAYOUT))[None, :]
    )
    parts = gl.zeros((row.shape[0], PARTS), gl.float32, LAYOUT)
    for first in gl.static_range(0, GROUPS, PARTS):
        parts += gl.load(at + first)
    sums = gl.reshape(sums_of_pairs(parts, PARTS), (row.shape[0],))
    return gl.convert_layout(gl.rsqrt(sums / IN + EPS), OWN)


@gluon.jit
def multiply_tiles(
    xs, ws, full, empty, part, x_scales, in_squares, scales, residual, norm, rotary, slots, y, scaled, squares,
    cache, tokens, layer,
    KIND: gl.constexpr, IN: gl.constexpr, OUT: gl.constexpr, COLUMN_TILES: gl.constexpr, EPS: gl.constexpr,
    GROUP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    GROUP_ROWS: gl.constexpr, PAIRED: gl.constexpr, WIDTH: gl.constexpr, HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, STRIDE: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """Multiply and write half `part` of the rows of every tile of the workgroup."""
    HALF: gl.constexpr = ROWS // 2
    IS_FP8: gl.constexpr = x_scales is not None
    IS_WIDE: gl.constexpr = IS_FP8 and COLUMNS == 256
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, COLUMNS // 2 if IS_WIDE else COLUMNS, WIDTH]
    )
    row_tiles = gl.cdiv(tokens, ROWS)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * COLUMN_TILES, gl.num_programs(0)):
        row_tile, column_tile = tile_at(tile, row_tiles, COLUMN_TILES, GROUP_ROWS)
        row = row_tile * ROWS + part * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SUMS))
        own = gl.minimum(row, tokens - 1)
        # A tile as two halves of columns, which are gate and up or two heads.
        if IS_FP8:
            scale_at = x_scales + own.to(gl.int64) * (IN // FP8_GROUP)
            if IS_WIDE:
                low, high = wide_fp8_sums(
                    xs, ws, full, empty, step, part, scale_at, SUMS, IN, ROWS, COLUMNS, DEPTH, STAGES
                )
            else:
                sums = fp8_sums(
                    xs, ws, full, empty, step, part, scale_at, SUMS, PAIRED, IN, ROWS, COLUMNS, DEPTH, STAGES
                )
                low, high = halves(sums, COLUMNS // 2)
        else:
            sums = float_sums(xs, ws, full, empty, step, part, SUMS, IN, ROWS, COLUMNS, DEPTH, STAGES)
            low, high = halves(sums, COLUMNS // 2)
        step += IN // DEPTH
        LAYOUT: gl.constexpr = low.type.layout
        row = gl.convert_layout(row, gl.SliceLayout(1, LAYOUT))
        own = gl.convert_layout(own, gl.SliceLayout(1, LAYOUT))
        if in_squares is not None:
            inverse = inverse_rms(in_squares, own, IN, GROUP, EPS)
        if IS_FP8:
            column = gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, LAYOUT))
            if KIND == "gated_linear":
                low_scale = scales + column_tile * (COLUMNS // 2) + column
                high_scale = low_scale + OUT
            else:
                low_scale = scales + column_tile * COLUMNS + column
                high_scale = low_scale + COLUMNS // 2
            low = low * gl.load(low_scale)[None, :]
            high = high * gl.load(high_scale)[None, :]
        if in_squares is not None:
            low = low * inverse[:, None]
            high = high * inverse[:, None]
        if KIND == "linear":
            first = column_tile * COLUMNS
            store_linear(low, residual, norm, y, scaled, squares, row, first, tokens, OUT, GROUP)
            store_linear(
                high, residual, norm, y, scaled, squares, row, first + COLUMNS // 2, tokens, OUT, GROUP
            )
        elif KIND == "gated_linear":
            store_gated(low, high, y, row, column_tile * (COLUMNS // 2), tokens, OUT)
        elif COLUMNS == HEAD_DIM:
            store_head(
                low, high, rotary, slots, cache, y, row, column_tile, tokens, layer,
                HEADS, KV_HEADS, HEAD_DIM, STRIDE, ROW,
            )  # fmt: skip
        else:
            gl.static_assert(COLUMNS == 2 * HEAD_DIM)
            first_low, first_high = halves(low, HEAD_DIM // 2)
            second_low, second_high = halves(high, HEAD_DIM // 2)
            NARROW: gl.constexpr = gl.SliceLayout(1, first_low.type.layout)
            row = gl.convert_layout(row, NARROW)
            head = column_tile * 2
            store_head(
                first_low, first_high, rotary, slots, cache, y, row, head, tokens, layer,
                HEADS, KV_HEADS, HEAD_DIM, STRIDE, ROW,
            )  # fmt: skip
            store_head(
                second_low, second_high, rotary, slots, cache, y, row, head + 1, tokens, layer,
                HEADS, KV_HEADS, HEAD_DIM, STRIDE, ROW,
            )  # fmt: skip


@gluon.jit
def store_linear(
    sums, residual, norm, y, scaled, squares, row, first, tokens, OUT: gl.constexpr, GROUP: gl.constexpr
):
    SUMS: gl.constexpr = sums.type.layout
    COLUMNS: gl.constexpr = sums.shape[1]
    column = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, SUMS))
    at = row[:, None].to(gl.int64) * OUT + column[None, :]
    inside = (row < tokens)[:, None] & (column < OUT)[None, :]
    sums += gl.load(residual + at, mask=inside, other=0.0)
    gl.store(y + at, sums, mask=inside)
    if norm is not None:
        weight = gl.load(norm + column)
        gl.store(scaled + at, (sums * weight[None, :]).to(scaled.dtype.element_ty), mask=inside)
        even, odd = gl.split(gl.reshape(sums, (sums.shape[0], COLUMNS // 2, 2)))
        of_groups = sums_of_pairs(gl.fma(even, even, odd * odd), GROUP // 2)
        GROUPS: gl.constexpr = of_groups.type.layout
        group = first // GROUP + gl.arange(0, COLUMNS // GROUP, gl.SliceLayout(0, GROUPS))
        of_row = gl.convert_layout(row, gl.SliceLayout(1, GROUPS))
        at = squares + of_row[:, None].to(gl.int64) * (OUT // GROUP) + group[None, :]
        gl.store(at, of_groups, mask=(of_row < tokens)[:, None])


@gluon.jit
def halves(x, SIZE: gl.constexpr):
    """Split neighbours of SIZE columns: x [ROWS, N] -> two of [ROWS, N / 2]."""
    ROWS: gl.constexpr = x.shape[0]
    PAIRS: gl.constexpr = x.shape[1] // (2 * SIZE)
    parts = gl.permute(gl.reshape(x, (ROWS, PAIRS, 2, SIZE)), (0, 1, 3, 2))
    low, high = gl.split(parts)
    return gl.reshape(low, (ROWS, PAIRS * SIZE)), gl.reshape(high, (ROWS, PAIRS * SIZE))


@gluon.jit
def store_gated(gate, up, y, row, first, tokens, OUT: gl.constexpr):
    column = first + gl.arange(0, gate.shape[1], gl.SliceLayout(0, gate.type.layout))
    at = row[:, None].to(gl.int64) * OUT + column[None, :]
    gl.store(y + at, (gate / (1 + gl.exp(-gate)) * up).to(y.dtype.element_ty), mask=(row < tokens)[:, None])


@gluon.jit
def store_head(
    low, high, rotary, slots, cache, q, row, head, tokens, layer,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, STRIDE: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = HEAD_DIM // 2
    LAYOUT: gl.constexpr = low.type.layout
    own = gl.minimum(row, tokens - 1)
    angle = gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
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
        plane = (head - HEADS) // KV_HEADS
        cache_row = gl.load(slots + own)[:, None] + (layer * 2 + plane) * STRIDE
        at = cache + cache_row * ROW + ((head - HEADS) % KV_HEADS * HEAD_DIM + angle)[None, :]
        gl.store(at, low.to(cache.dtype.element_ty), mask=inside)
        gl.store(at + HALF, high.to(cache.dtype.element_ty), mask=inside)


@gluon.jit
def matmul(
    x, x_scales, in_squares, w, scales, residual, norm, rotary, slots, cache, y, scaled, squares,
    scratch, tokens, layer,
    KIND: gl.constexpr, IN: gl.constexpr, OUT: gl.constexpr, EPS: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    GROUP_ROWS: gl.constexpr, PAIRED: gl.constexpr, WIDTH: gl.constexpr, HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, STRIDE: gl.constexpr, ROW: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    IS_GATED: gl.constexpr = KIND == "gated_linear"
    UP: gl.constexpr = OUT if IS_GATED else 0
    W_ROWS: gl.constexpr = 2 * OUT if IS_GATED else OUT
    COLUMN_TILES: gl.constexpr = W_ROWS // COLUMNS
    W_BOX: gl.constexpr = COLUMNS // 2 if IS_GATED else COLUMNS
    DTYPE: gl.constexpr = w.dtype.element_ty
    X_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], DTYPE)
    W_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, DEPTH], DTYPE)
    x_map = tma.make_tensor_descriptor(x, [tokens, IN], [IN, 1], [ROWS, DEPTH], X_LAYOUT)
    w_map = tma.make_tensor_descriptor(w, [W_ROWS, IN], [IN, 1], [W_BOX, DEPTH], W_LAYOUT)
    xs = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, DEPTH], X_LAYOUT)
    ws = gl.allocate_shared_memory(DTYPE, [STAGES, COLUMNS, DEPTH], W_LAYOUT)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_tiles, (
                xs, ws, full, empty, 0, x_scales, in_squares, scales, residual, norm, rotary, slots, y, scaled,
                squares, cache, tokens, layer, KIND, IN, OUT, COLUMN_TILES, EPS, GROUP, ROWS, COLUMNS, DEPTH,
                STAGES, GROUP_ROWS, PAIRED, WIDTH, HEADS, KV_HEADS, HEAD_DIM, STRIDE, ROW,
            )),
            (multiply_tiles, (
                xs, ws, full, empty, 1, x_scales, in_squares, scales, residual, norm, rotary, slots, y, scaled,
                squares, cache, tokens, layer, KIND, IN, OUT, COLUMN_TILES, EPS, GROUP, ROWS, COLUMNS, DEPTH,
                STAGES, GROUP_ROWS, PAIRED, WIDTH, HEADS, KV_HEADS, HEAD_DIM, STRIDE, ROW,
            )),
            (load_tiles, (
                x_map, w_map, xs, ws, full, empty, tokens, IN, COLUMN_TILES, UP, ROWS, COLUMNS, DEPTH, STAGES,
                GROUP_ROWS,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
