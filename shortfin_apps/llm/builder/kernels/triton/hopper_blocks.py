"""Products of many tokens with weights in blocks on Hopper, in Gluon (see hopper_product.py).

Weights are the first operand of the matrix instructions, which they reach in registers: each of two groups of
four warps widens and multiplies half of a tile's TILE rows of w, while the other group's products run.
Another warp loads x, w and its terms ahead, by TMA. K is added in the order of `product` (product.py) with
PARTS = 1, and weights are widened as in blocks.py, so a row has the same bits as there.

A tile's rows are pairs of which a thread has both: gate and up of a column, an angle's two features of a
head, or two neighbours. PAIRS is where they are, in rows of w: from one tile to the next, from 8 pairs to the
next, from a pair's first row to its second, and from a pair to the next.
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

from shortfin_apps.llm.builder.kernels.triton.blocks import PTX_BF16, PTX_BYTES
from shortfin_apps.llm.builder.kernels.triton.hopper_product import first_loaded, tile_at

TILE = gl.constexpr(128)  # rows of w
HALF = gl.constexpr(64)  # rows of w for each group of warps, and of one matrix instruction
DEPTH = gl.constexpr(128)  # of K per buffer
UNROLLED = gl.constexpr(4)  # steps of K, or half as many; of two steps, terms may be in one box
TERMS = gl.constexpr(8)  # blocks whose scales, or minima, are loaded at once: the 16 bytes of a box at least
NO_MINIMUM = "0x80008000"  # two of -0.0, which changes no product
MADE = ("made0", "made1", "made2", "made3")  # registers with a pair of neighbours each


@gluon.aggregate
class Ring:
    """STAGES buffers for tiles along K, with a pair of barriers each.

    `xs` [STAGES, TOKENS, DEPTH]; `ws`, two bytes at a time, and `scales` and `minima` [.., 8, 2, 8, ..]: 8
    times 8 first and 8 second rows of pairs. Without minima, `minima` is `scales`. `full`: the buffer's loads
    have arrived; `empty`: both groups of warps have read it.
    """

    xs: gl.shared_memory_descriptor
    ws: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    minima: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def make_ring(x_map, w_map, term_map, HAS_MINIMA: gl.constexpr, STAGES: gl.constexpr):
    """Allocate a ring for the boxes of the maps."""
    xs = gl.allocate_shared_memory(x_map.dtype, [STAGES, x_map.block_shape[0], DEPTH], x_map.layout)
    ws = gl.allocate_shared_memory(w_map.dtype, [STAGES, 1, 8, 2, 8, w_map.block_shape[4]], w_map.layout)
    scales = gl.allocate_shared_memory(term_map.dtype, [STAGES, 1, 8, 2, 8, TERMS], term_map.layout)
    minima = scales
    if HAS_MINIMA:
        minima = gl.allocate_shared_memory(term_map.dtype, [STAGES, 1, 8, 2, 8, TERMS], term_map.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    return Ring(xs, ws, scales, minima, full, empty)  # type: ignore[call-arg]  # the decorator makes it


@gluon.jit
def pairs_map(matrix, TILES: gl.constexpr, PAIRS: gl.constexpr, ROW: gl.constexpr, INNER: gl.constexpr):
    """Make the TMA's description of `matrix`, of rows of ROW elements, read in boxes of INNER of a tile."""
    BOX: gl.constexpr = [1, 8, 2, 8, INNER]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BOX, matrix.dtype.element_ty)
    STRIDES: gl.constexpr = [PAIRS[0] * ROW, PAIRS[1] * ROW, PAIRS[2] * ROW, PAIRS[3] * ROW, 1]
    return tma.make_tensor_descriptor(matrix, [TILES, 8, 2, 8, ROW], STRIDES, BOX, LAYOUT)


@gluon.jit
def load_tiles(
    ring, x_map, w_map, scale_map, least_map, tokens,
    IN: gl.constexpr, TILES: gl.constexpr, HAS_MINIMA: gl.constexpr, SIZE: gl.constexpr,
):  # fmt: skip
    """Load x, w and its terms along K for every tile of the workgroup; run by one warp.

    SIZE: weights per block. Of blocks of 32, each box of terms is loaded for two steps.
    """
    TOKENS: gl.constexpr = ring.xs.shape[1]
    STAGES: gl.constexpr = ring.xs.shape[0]
    INNER: gl.constexpr = ring.ws.shape[5]
    STEPS: gl.constexpr = TERMS * SIZE // DEPTH  # with the same box of terms
    TERM_BYTES: gl.constexpr = scale_map.nbytes_per_cta * (2 if HAS_MINIMA else 1)
    row_tiles = gl.cdiv(tokens, TOKENS)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * TILES, gl.num_programs(0)):
        row_tile, column_tile = tile_at(tile, row_tiles, TILES)
        first_row = first_loaded(row_tile * TOKENS, tokens, TOKENS)
        for number in range(IN // DEPTH):
            slot = step % STAGES
            mbarrier.wait(ring.empty.index(slot), (step // STAGES & 1) ^ 1)
            ready = ring.full.index(slot)
            mbarrier.expect(ready, x_map.nbytes_per_cta + w_map.nbytes_per_cta + TERM_BYTES)
            tma.async_load(w_map, [column_tile, 0, 0, 0, number * INNER], ready, ring.ws.index(slot))
            terms = [column_tile, 0, 0, 0, number // STEPS * TERMS]
            tma.async_load(scale_map, terms, ready, ring.scales.index(slot))
            if HAS_MINIMA:
                tma.async_load(least_map, terms, ready, ring.minima.index(slot))
            tma.async_load(x_map, [first_row, number * DEPTH], ready, ring.xs.index(slot))
            step += 1


@gluon.jit
def product_of_half(
    ring, step, part: gl.constexpr, IN: gl.constexpr, HAS_MINIMA: gl.constexpr, SIZE: gl.constexpr
):
    """Return the sums of a tile's half `part` of rows of w; the ring starts with `step`.

    Returns two of [TOKENS, HALF / 2] f32: those of the pairs' first rows and of their second.
    """
    TOKENS: gl.constexpr = ring.xs.shape[1]
    STAGES: gl.constexpr = ring.xs.shape[0]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    STEPS: gl.constexpr = UNROLLED if IN % (UNROLLED * DEPTH) == 0 else UNROLLED // 2
    sums = gl.zeros((HALF, TOKENS), gl.float32, SUMS)
    for _ in range(IN // (STEPS * DEPTH)):
        # At the end of the loop, no product may run: the assembler keeps an operand's registers until the
        # product has ended, but not over the loop's end.
        running = warpgroup_mma_init(sums)
        for number in gl.static_range(STEPS):
            slot = step % STAGES
            mbarrier.wait(ring.full.index(slot), step // STAGES & 1)
            wide = _widened(ring, slot, part, number, SUMS, HAS_MINIMA, SIZE)
            running, wide = warpgroup_mma_wait(0, deps=[running, wide])
            if number > 0:
                mbarrier.arrive(ring.empty.index((step - 1) % STAGES))
            running = warpgroup_mma(wide, ring.xs.index(slot).permute((1, 0)), running, is_async=True)
            step += 1
        sums = warpgroup_mma_wait(0, deps=[running])
        mbarrier.arrive(ring.empty.index((step - 1) % STAGES))
    pairs = gl.permute(gl.reshape(sums, (HALF // 16, 2, 8, TOKENS)), (3, 0, 2, 1))
    first, second = gl.split(pairs)
    return gl.reshape(first, (TOKENS, HALF // 2)), gl.reshape(second, (TOKENS, HALF // 2))


@gluon.jit
def _widened(
    ring, slot, part: gl.constexpr, number: gl.constexpr, SUMS: gl.constexpr, HAS_MINIMA: gl.constexpr,
    SIZE: gl.constexpr,
):  # fmt: skip
    """Widen half of a buffer's w, of step `number`, to bf16 [HALF, DEPTH]: the first operand of a product."""
    PACKED: gl.constexpr = ring.ws.shape[5]
    packed = ring.ws.index(slot).reshape([TILE, PACKED]).slice(part * HALF, HALF).load(packed_layout(PACKED))
    operands = [packed, _terms(ring.scales, slot, part, number, SIZE)]
    if HAS_MINIMA:
        operands += [_terms(ring.minima, slot, part, number, SIZE)]
    WIDE: gl.constexpr = gl.distributed_type(gl.bfloat16, [HALF, DEPTH], gl.DotOperandLayout(0, SUMS, 2))
    if HAS_MINIMA:
        return gl.inline_asm(widening, ("=&h", "h", "h", "h"), operands, WIDE, is_pure=True)
    else:
        return gl.inline_asm(widening, ("=&h", "h", "h"), operands, WIDE, is_pure=True)


@gluon.jit
def _terms(ring, slot, part: gl.constexpr, number: gl.constexpr, SIZE: gl.constexpr):
    """Load the scales or the minima of a step's blocks."""
    terms = ring.index(slot).reshape([TILE, TERMS]).slice(part * HALF, HALF).load(terms_layout(TERMS))
    if TERMS * SIZE == DEPTH:
        return terms
    else:
        even, odd = gl.split(gl.permute(gl.reshape(terms, (HALF, 2, TERMS // 2)), (0, 2, 1)))
        return odd if number % 2 else even


@gluon.constexpr_function
def packed_layout(COUNT):
    """Return the layout of packed weights [HALF, COUNT], two bytes each.

    A thread has two rows. Of each 16 bytes of a row it has four, as the matrix instruction distributes 16
    elements of K; registers are in the order of bytes, rows and 16 bytes.
    """
    registers = [[0, 8 << n] for n in range((COUNT // 8).bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    warps = [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout([[0, 4], [8, 0], *registers], lanes, warps, [], [HALF.value, COUNT])


@gluon.constexpr_function
def terms_layout(COUNT):
    """Return the layout of terms [HALF, COUNT]: a thread has two rows, and a block's two terms in turn."""
    registers = [[0, 1 << n] for n in range(COUNT.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    warps = [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout([[8, 0], *registers], lanes, warps, [], [HALF.value, COUNT])


@gluon.constexpr_function
def widening(outputs, inputs):
    """Return PTX that widens a thread's weights of a step, from registers in the layouts above.

    The inputs are packed weights, scales and maybe minima. The result's registers are in the order of pairs
    of neighbours, rows, 8 elements of K and 16 elements.
    """
    [wide], [packed, scales, *minima] = outputs, inputs
    is_4_bits = len(wide) > 2 * len(packed)
    one, made = (PTX_BF16, MADE) if is_4_bits else (PTX_BYTES, MADE[:2])
    operands = [*made, "given", "scale", "scale", "least", "least"]
    lines = [f".reg .b32 {', '.join([*MADE, 'given', 'scale', 'least'])};", f"mov.b32 least, {NO_MINIMUM};"]
    for number in range(len(packed) // 2):
        row, unit = number % 2, number // 2
        term = row + 2 * (2 * unit * len(scales) // len(packed))
        lines += [
            f"mov.b32 given, {{{packed[2 * number]}, {packed[2 * number + 1]}}};",
            f"mov.b32 scale, {{{scales[term]}, {scales[term]}}};",
            *(f"mov.b32 least, {{{each[term]}, {each[term]}}};" for each in minima),
            _with_operands(one.value, operands),
        ]
        for n, each in enumerate(made):
            # Of 4 bits, the last two pairs are of the bytes' high halves, 16 elements after the others.
            place = 2 * row + 4 * (n % 2) + 8 * (unit * len(made) // 2 + n // 2)
            lines.append(f"mov.b32 {{{wide[place]}, {wide[place + 1]}}}, {each};")
    return "\n".join(["{", *lines, "}"])


@gluon.constexpr_function
def _with_operands(ptx, names):
    """Replace $0, $1, ... by names, which the PTX's own registers must not have."""
    for n, name in enumerate(names):
        ptx = ptx.replace(f"${n}", name)
    return ptx
