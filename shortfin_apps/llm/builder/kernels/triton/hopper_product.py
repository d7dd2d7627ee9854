"""Products of many tokens on Hopper, in Gluon: loads by TMA, warps with roles, resident workgroups.

A workgroup computes tiles of ROWS tokens by COLUMNS rows of w, one after another. Two groups of four warps
multiply, each half of a tile's rows. Another warp loads x and w ahead into a ring of buffers, also across
tiles. Workgroups do not wait for each other, so their number is free.

K is added in the order of `product` (product.py) and `fp8_product` (fp8.py) with PARTS = 1 and tiles of 64
rows and more, and all other arithmetic is theirs, so a row has the same bits in either form: on an H200, the
results of all rows and matmuls of an 8B layer were equal, in bf16 and fp8, for 512, 1000 and 2048 tokens
(`all` in bench/matmul_times.py).
"""

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

from shortfin_apps.llm.builder.kernels import triton as rooms
from shortfin_apps.llm.builder.kernels.triton.product import sums_of_neighbours

FP8_GROUP = gl.constexpr(rooms.FP8_GROUP)
DEPTH_BITS = gl.constexpr(1024)  # of K per buffer, as wide as the swizzled rows of shared memory
STEP_BITS = gl.constexpr(256)  # of K per matrix instruction
GROUP_ROWS = gl.constexpr(16)  # rows of tiles that are computed together
SUMMED_AT_ONCE = gl.constexpr(32)  # partial sums of squares


@gluon.aggregate
class Ring:
    """STAGES buffers for tiles of x and w along K, with a pair of barriers each.

    `xs` [STAGES, ROWS, DEPTH], `ws` [STAGES, COLUMNS, DEPTH]. `full`: the buffer's loads have arrived;
    `empty`: both groups of warps have read it.
    """

    xs: gl.shared_memory_descriptor
    ws: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def make_ring(x_map, w_map, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """Allocate a ring for two boxes of `x_map`, and COLUMNS rows of `w_map`."""
    ROWS: gl.constexpr = 2 * x_map.block_shape[0]
    DEPTH: gl.constexpr = x_map.block_shape[1]
    X_LAYOUT: gl.constexpr = x_map.layout
    W_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, DEPTH], w_map.dtype)
    xs = gl.allocate_shared_memory(x_map.dtype, [STAGES, ROWS, DEPTH], X_LAYOUT)
    ws = gl.allocate_shared_memory(w_map.dtype, [STAGES, COLUMNS, DEPTH], W_LAYOUT)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    return Ring(xs, ws, full, empty)  # type: ignore[call-arg]  # the decorator makes the constructor


@gluon.jit
def tensor_map(matrix, rows, IN: gl.constexpr, BOX_ROWS: gl.constexpr, DEPTH: gl.constexpr):
    """Make the TMA's description of `matrix` [rows, IN], read in boxes of BOX_ROWS rows and DEPTH of K.

    The workgroup writes it to memory that it alone uses (see scratch in ahead_of_time/ptx.py). As another
    launch had another map there, it then invalidates the TMA unit's copy: the fences are part of
    `make_tensor_descriptor`.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BOX_ROWS, DEPTH], matrix.dtype.element_ty)
    return tma.make_tensor_descriptor(matrix, [rows, IN], [IN, 1], [BOX_ROWS, DEPTH], LAYOUT)


@gluon.jit
def first_loaded(first, tokens, COUNT: gl.constexpr):
    """Return the row from which COUNT rows of x are loaded for the rows from `first` on.

    The last rows are loaded with rows before them if there are any: TMA takes much longer to load rows out of
    range than others. All are computed; `tile_rows` (hopper_epilogues.py) tells which to store.
    """
    return gl.maximum(gl.minimum(first, tokens - COUNT), 0)


@gluon.jit
def loaded_rows(first, tokens, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the rows [COUNT] that are loaded for those from `first` on; out of range, the last one."""
    row = first_loaded(first, tokens, COUNT) + gl.arange(0, COUNT, LAYOUT)
    return gl.minimum(row, tokens - 1)


@gluon.jit
def tile_at(tile, row_tiles, column_tiles):
    """Return the row and column of a tile; tiles of GROUP_ROWS rows follow each other and share L2."""
    in_group = GROUP_ROWS * column_tiles
    first = tile // in_group * GROUP_ROWS
    rows = gl.minimum(row_tiles - first, GROUP_ROWS)
    inside = tile % in_group
    return first + inside % rows, inside // rows


@gluon.jit
def load_tiles(
    ring, x_map, w_map, tokens, IN: gl.constexpr, COLUMN_TILES: gl.constexpr, SECOND_HALF: gl.constexpr
):
    """Load x and w along K for every tile of the workgroup; run by one warp.

    SECOND_HALF: None, or the row of w from which a tile's second half of columns counts.
    """
    ROWS: gl.constexpr = ring.xs.shape[1]
    COLUMNS: gl.constexpr = ring.ws.shape[1]
    DEPTH: gl.constexpr = ring.xs.shape[2]
    STAGES: gl.constexpr = ring.xs.shape[0]
    HALF: gl.constexpr = COLUMNS // 2
    X_HALF: gl.constexpr = ROWS // 2
    W_BOXES: gl.constexpr = 1 if SECOND_HALF is None else 2
    LOADED_BYTES: gl.constexpr = x_map.nbytes_per_cta * 2 + w_map.nbytes_per_cta * W_BOXES
    row_tiles = gl.cdiv(tokens, ROWS)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * COLUMN_TILES, gl.num_programs(0)):
        row_tile, column_tile = tile_at(tile, row_tiles, COLUMN_TILES)
        first_row = first_loaded(row_tile * ROWS, tokens, X_HALF)
        second_row = first_loaded(row_tile * ROWS + X_HALF, tokens, X_HALF)
        for k in range(0, IN, DEPTH):
            slot = step % STAGES
            mbarrier.wait(ring.empty.index(slot), (step // STAGES & 1) ^ 1)
            ready = ring.full.index(slot)
            mbarrier.expect(ready, LOADED_BYTES)
            x_slot = ring.xs.index(slot)
            w_slot = ring.ws.index(slot)
            tma.async_load(x_map, [first_row, k], ready, x_slot.slice(0, X_HALF))
            tma.async_load(x_map, [second_row, k], ready, x_slot.slice(X_HALF, X_HALF))
            if SECOND_HALF is None:
                tma.async_load(w_map, [column_tile * COLUMNS, k], ready, w_slot)
            else:
                first = column_tile * HALF
                tma.async_load(w_map, [first, k], ready, w_slot.slice(0, HALF))
                tma.async_load(w_map, [SECOND_HALF + first, k], ready, w_slot.slice(HALF, HALF))
            step += 1


@gluon.jit
def product_of_half(
    ring, step, part, first_row, tokens, x_scales, in_squares, scales, bias, low_first, high_first,
    IN: gl.constexpr, EPS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Compute `normalised_product` (product.py) of a tile's half `part`, plus any `bias` of the rows of w.

    Returns the columns' first and second half [ROWS / 2, COLUMNS / 2], of the rows of w from `low_first` and
    `high_first` on. The rows are those that are loaded for `first_row`; the ring starts with `step`.
    """
    COLUMNS: gl.constexpr = ring.ws.shape[1]
    STEP: gl.constexpr = STEP_BITS // ring.xs.dtype.primitive_bitwidth
    HALF: gl.constexpr = ring.xs.shape[1] // 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, STEP])
    own = loaded_rows(first_row, tokens, HALF, gl.SliceLayout(1, SUMS))
    if x_scales is None:
        sums = float_sums(ring, step, part, SUMS, IN)
    else:
        sums = fp8_sums(ring, step, part, x_scales + own.to(gl.int64) * (IN // FP8_GROUP), SUMS, IN)
    low, high = halves(sums, COLUMNS // 2)
    LAYOUT: gl.constexpr = low.type.layout
    if in_squares is not None:
        own = gl.convert_layout(own, gl.SliceLayout(1, LAYOUT))
        inverse = inverse_rms(in_squares, own, IN, GROUP, EPS)
    column = gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, LAYOUT))
    if scales is not None:
        low = low * gl.load(scales + low_first + column)[None, :]
        high = high * gl.load(scales + high_first + column)[None, :]
    if in_squares is not None:
        low = low * inverse[:, None]
        high = high * inverse[:, None]
    if bias is not None:
        low += gl.load(bias + low_first + column)[None, :]
        high += gl.load(bias + high_first + column)[None, :]
    return low, high


@gluon.jit
def float_sums(ring, step, part, SUMS: gl.constexpr, IN: gl.constexpr):
    """Return the sums [ROWS / 2, COLUMNS] f32 of a tile's half `part`, for floats of 16 bits."""
    COLUMNS: gl.constexpr = ring.ws.shape[1]
    DEPTH: gl.constexpr = ring.xs.shape[2]
    STAGES: gl.constexpr = ring.xs.shape[0]
    HALF: gl.constexpr = ring.xs.shape[1] // 2
    zeros = warpgroup_mma_init(gl.zeros((HALF, COLUMNS), gl.float32, SUMS))
    # The first step is apart, so that each later step can release the buffers of the step before.
    sums = start_product(ring, step, part, zeros, True)
    for _ in range(DEPTH, IN, DEPTH):
        step += 1
        sums = start_product(ring, step, part, sums, False)
        sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
        mbarrier.arrive(ring.empty.index((step - 1) % STAGES))
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(ring.empty.index(step % STAGES))
    return sums


@gluon.jit
def fp8_sums(ring, step, part, x_scales, SUMS: gl.constexpr, IN: gl.constexpr):
    """Return the sums for 8-bit floats: products of groups of K, each times the scales of x.

    `x_scales` [ROWS / 2] has the addresses of the rows' first scales. DEPTH is FP8_GROUP.
    """
    COLUMNS: gl.constexpr = ring.ws.shape[1]
    STAGES: gl.constexpr = ring.xs.shape[0]
    HALF: gl.constexpr = ring.xs.shape[1] // 2
    sums = gl.zeros((HALF, COLUMNS), gl.float32, SUMS)
    for group in range(IN // FP8_GROUP):
        scale = gl.load(x_scales + group)
        zeros = warpgroup_mma_init(gl.zeros((HALF, COLUMNS), gl.float32, SUMS))
        product = start_product(ring, step, part, zeros, True)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(ring.empty.index(step % STAGES))
        sums = gl.fma(product, scale[:, None].broadcast_to(product.shape), sums)
        step += 1
    return sums


@gluon.jit
def start_product(ring, step, part, sums, IS_FIRST: gl.constexpr):
    """Wait for the loads of a step; start its product: added to `sums`, or if IS_FIRST without them."""
    STAGES: gl.constexpr = ring.xs.shape[0]
    HALF: gl.constexpr = ring.xs.shape[1] // 2
    slot = step % STAGES
    mbarrier.wait(ring.full.index(slot), step // STAGES & 1)
    x = ring.xs.index(slot).slice(part * HALF, HALF)
    w = ring.ws.index(slot).permute((1, 0))
    return warpgroup_mma(x, w, sums, use_acc=not IS_FIRST, is_async=True)


@gluon.jit
def inverse_rms(in_squares, row, IN: gl.constexpr, GROUP: gl.constexpr, EPS: gl.constexpr):
    """Return the 1 / rms of a deferred norm for the rows `row` [COUNT], as in `normalised_product`."""
    GROUPS: gl.constexpr = IN // GROUP
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    own = gl.convert_layout(row, gl.SliceLayout(1, LAYOUT))
    group = gl.arange(0, SUMMED_AT_ONCE, gl.SliceLayout(0, LAYOUT))
    at = in_squares + own[:, None].to(gl.int64) * GROUPS + group[None, :]
    parts = gl.zeros((row.shape[0], SUMMED_AT_ONCE), gl.float32, LAYOUT)
    for first in gl.static_range(0, GROUPS, SUMMED_AT_ONCE):
        if first + SUMMED_AT_ONCE <= GROUPS:
            parts += gl.load(at + first)
        else:
            parts += gl.load(at + first, mask=(first + group < GROUPS)[None, :], other=0.0)
    return gl.convert_layout(gl.rsqrt(row_sums(parts) / IN + EPS), row.type.layout)


@gluon.jit
def row_sums(x):
    """Sum the columns of x [COUNT, COLUMNS], by pairs of neighbours."""
    sums = gl.reshape(sums_of_neighbours(x, x.shape[1]), (x.shape[0],))
    return gl.convert_layout(sums, gl.SliceLayout(1, x.type.layout))


@gluon.jit
def halves(x, SIZE: gl.constexpr):
    """Split neighbours of SIZE columns: x [ROWS, N] -> two of [ROWS, N / 2]."""
    ROWS: gl.constexpr = x.shape[0]
    PAIRS: gl.constexpr = x.shape[1] // (2 * SIZE)
    parts = gl.permute(gl.reshape(x, (ROWS, PAIRS, 2, SIZE)), (0, 1, 3, 2))
    low, high = gl.split(parts)
    return gl.reshape(low, (ROWS, PAIRS * SIZE)), gl.reshape(high, (ROWS, PAIRS * SIZE))
