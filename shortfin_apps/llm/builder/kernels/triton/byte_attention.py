"""Attention of single tokens over a KV cache in bytes, for many rows on NVIDIA GPUs, in Gluon.

`attend_singles` computes what its namesake in attention.py does, for a cache as in cached_bytes.py with heads
of 128 elements, without a window, cap or sinks. Triton moves bytes through shared memory to give each thread
its operands of the matrix instructions. Here, a workgroup is one warp, and each thread loads 16 neighbours of
a key or a value right into the registers in which it multiplies them. Products may add along k in any order,
so keys and queries share one (KEYS and TO_KEYS).

A byte becomes an f16 exactly, as bits of the mantissa of 1024 plus an integer: five instructions for four
bytes. (NVIDIA GPUs convert integers at a fraction of their speed.) So that queries fit into f16, they are
divided by a power of two above their largest element, and softmax weights times scales of values by one above
the largest scale so far.

A step has two pages. Loads of the next step's keys are issued once this step's keys are multiplied, and those
of its values once this step's values are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from shortfin_apps.llm.builder.kernels.triton.attention import load_part, single_of, store_part
from shortfin_apps.llm.builder.kernels.triton.cached_bytes import scales_of
from shortfin_apps.llm.builder.kernels.triton.running_softmax import (
    LOG2_E,
    LOWEST,
    merged,
    slots_of_share,
)
from shortfin_apps.llm.builder.kernels.triton.synchronisation import is_last_of

PAGE = gl.constexpr(16)  # slots
STEP = gl.constexpr(32)  # slots of two pages
WORDS = gl.constexpr(32)  # of 4 bytes, in a head's 128 elements
QUERIES = gl.constexpr(16)  # rows of a matrix instruction
MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]))
# A thread has 16 neighbours along k of a key.
KEYS, TO_KEYS = (gl.constexpr(gl.DotOperandLayout(n, MMA.value, 16)) for n in (1, 0))
VALUES, TO_VALUES = (gl.constexpr(gl.DotOperandLayout(n, MMA.value, 2)) for n in (1, 0))
OF_ROWS, OF_COLUMNS = (gl.constexpr(gl.SliceLayout(axis, MMA.value)) for axis in (1, 0))


def _of_one_warp(registers: list[list[int]], lanes: list[list[int]], shape: list[int]) -> gl.constexpr:
    return gl.constexpr(gl.DistributedLinearLayout(registers, lanes, [], [], shape))


# Which words a thread loads, so that their elements are those of KEYS and VALUES: [word, page, slot] of keys,
# [page, slot, word] of values, and [page, slot] of scales, as in OF_COLUMNS.
KEY_WORDS = _of_one_warp(
    registers=[[1, 0, 0], [2, 0, 0], [16, 0, 0], [0, 0, 8], [0, 1, 0]],
    lanes=[[4, 0, 0], [8, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
    shape=[32, 2, 16],
)
VALUE_WORDS = _of_one_warp(
    registers=[[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 8, 0], [1, 0, 0]],
    lanes=[[0, 2, 0], [0, 4, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
    shape=[2, 16, 32],
)
SCALES = _of_one_warp(
    registers=[[0, 1], [0, 8], [1, 0]],
    lanes=[[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
    shape=[2, 16],
)
# [query, element] of a result.
IN_ORDER = _of_one_warp(
    registers=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]],
    lanes=[[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
    shape=[16, 128],
)
# Four i8 to f16: with the sign bit flipped, bytes are 128 + x, and as mantissas 1024 + 128 + x.
_TO_F16 = gl.constexpr("""{
    .reg .b32 bits, exponent, low, high, offset;
    xor.b32 bits, $4, 0x80808080;
    mov.b32 exponent, 0x64646464;
    mov.b32 offset, 0xE480E480;
    prmt.b32 low, bits, exponent, 0x4140;
    prmt.b32 high, bits, exponent, 0x4342;
    add.f16x2 low, low, offset;
    add.f16x2 high, high, offset;
    mov.b32 {$0, $1}, low;
    mov.b32 {$2, $3}, high;
}""")


@gluon.jit
def attend_singles(
    q, cache, offsets, starts, seq_lens, blocks, counters, out, parts, states, tokens, rows, width, layer,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_ROWS: gl.constexpr,
    ROW: gl.constexpr, SPLIT: gl.constexpr, MOST_SPLITS: gl.constexpr,
):  # fmt: skip
    """Attend for rows of a single token only; all operands are as in attention.py."""
    SHARING: gl.constexpr = HEADS // KV_HEADS
    kv_head, row, share = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    token, last, is_single = single_of(offsets, starts, seq_lens, rows, row, tokens)
    slots = slots_of_share(last, SPLIT, MOST_SPLITS)
    shares = gl.maximum(gl.cdiv(last, slots), 1)
    if is_single & (share < shares):
        queries, query_scales = load_queries(
            q, token.to(gl.int64) * HEADS + kv_head * SHARING, SHARING, HEAD_DIM
        )
        peak, total, sums = attend_slots(
            queries, query_scales * (LOG2_E * HEAD_DIM**-0.5), share * slots,
            gl.minimum(last, (share + 1) * slots), cache, blocks + row.to(gl.int64) * width, layer, kv_head,
            KV_HEADS, HEAD_DIM, PAGE_ROWS, ROW,
        )  # fmt: skip
        # Columns 8 * n + part are elements 16 * part + n: 16 neighbours for each thread.
        sums = gl.reshape(gl.permute(gl.reshape(sums, [QUERIES, 16, 8]), (0, 2, 1)), [QUERIES, HEAD_DIM])
        OF_QUERIES: gl.constexpr = gl.SliceLayout(1, IN_ORDER)
        state = (
            gl.convert_layout(peak, OF_QUERIES),
            gl.convert_layout(total, OF_QUERIES),
            gl.convert_layout(sums, IN_ORDER, assert_trivial=True),
        )
        query = gl.arange(0, QUERIES, layout=OF_QUERIES)
        dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, IN_ORDER))[None, :]
        is_query = query < SHARING
        inside = is_query[:, None]
        head = kv_head * SHARING + query
        is_last = True
        if shares > 1:
            part = (row.to(gl.int64) * HEADS + head) * MOST_SPLITS
            store_part(parts, states, part + share, state, is_query, dim, inside, HEAD_DIM)
            is_last = is_last_of(shares, counters + row * KV_HEADS + kv_head)
            if is_last:
                state = load_part(parts, states, part, is_query, dim, inside, HEAD_DIM)
                for number in range(1, shares):
                    other = load_part(parts, states, part + number, is_query, dim, inside, HEAD_DIM)
                    state = merged(state, other)
        if is_last:
            values = gl.where((state[1] > 0)[:, None], state[2] / state[1][:, None], 0.0)
            at = out + (token.to(gl.int64) * HEADS + head)[:, None] * HEAD_DIM + dim
            gl.store(at, values.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def nothing(HEAD_DIM: gl.constexpr):
    """Return the state of an empty softmax: peak and total [QUERIES], sums [QUERIES, HEAD_DIM]."""
    peak = gl.full([QUERIES], LOWEST, gl.float32, OF_ROWS)
    total = gl.full([QUERIES], 0.0, gl.float32, OF_ROWS)
    return peak, total, gl.full([QUERIES, HEAD_DIM], 0.0, gl.float32, MMA)


@gluon.jit
def load_queries(q, first, SHARING: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Load SHARING heads of q from head `first` on, as f16 [QUERIES, HEAD_DIM] times a power of two each.

    Also returns these powers, [QUERIES] f32.
    """
    query = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, TO_KEYS))[:, None]
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, TO_KEYS))[None, :]
    heads = gl.load(q + (first + query) * HEAD_DIM + dim, mask=query < SHARING, other=0.0).to(gl.float32)
    exponent = exponent_above(gl.max(gl.abs(heads), 1))
    narrow = (heads * power_of_two(-exponent)[:, None]).to(gl.float16)
    return narrow, gl.convert_layout(power_of_two(exponent), OF_ROWS)


@gluon.jit
def attend_slots(
    queries, query_scales, begin, end, cache, table, layer, kv_head,
    KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_ROWS: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """Attend to the slots `begin` to `end` - 1; return peak, total and sums as in running_softmax.py.

    `begin` must be the first slot of a page. Scores are multiplied by `query_scales` [QUERIES].
    """
    heads = cache.to(gl.pointer_type(gl.int32), bitcast=True) + kv_head * WORDS
    scales = scales_of(cache, KV_HEADS, HEAD_DIM) + kv_head
    peak, total, sums = nothing(HEAD_DIM)
    exponent = -126  # exponent of the power of two above all scales of values so far
    pages = load_pages(table, begin, end)
    keys = load_keys(heads, pages, layer, PAGE_ROWS, ROW)
    key_scales, value_scales = load_scales(scales, pages, begin, end, layer, PAGE_ROWS, ROW)
    values = load_values(heads, pages, layer, PAGE_ROWS, ROW)
    pages = load_pages(table, begin + STEP, end)
    for at in range(begin, end, STEP):
        pages_after = load_pages(table, at + 2 * STEP, end)
        wide = gl.reshape(gl.permute(as_f16(keys), (0, 3, 4, 1, 2)), [HEAD_DIM, STEP])
        zero = gl.full([QUERIES, STEP], 0.0, gl.float32, MMA)
        scores = mma_v2(queries, gl.convert_layout(wide, KEYS, assert_trivial=True), zero)
        keys = load_keys(heads, pages, layer, PAGE_ROWS, ROW)
        next_key_scales, next_value_scales = load_scales(scales, pages, at + STEP, end, layer, PAGE_ROWS, ROW)
        exists = at + gl.arange(0, STEP, layout=OF_COLUMNS) < end
        scores = scores * query_scales[:, None] * key_scales[None, :] + gl.where(exists, 0.0, LOWEST)[None, :]
        new_peak = gl.maximum(peak, gl.max(scores, 1))
        weights = gl.exp2(scores - new_peak[:, None])
        decay = gl.exp2(peak - new_peak)
        total = gl.fma(total, decay, gl.sum(weights, 1))
        new_exponent = gl.maximum(exponent, exponent_above(gl.max(value_scales, 0)))
        weights *= (value_scales * power_of_two(-new_exponent))[None, :]
        sums *= (decay * power_of_two(exponent - new_exponent))[:, None]
        # [page, slot, part of 16 elements, word, element, element] -> [slot, 8 * element of a part + part]
        apart = gl.reshape(values, [2, PAGE, 8, 4])
        wide = gl.reshape(gl.permute(as_f16(apart), (0, 1, 3, 4, 5, 2)), [STEP, HEAD_DIM])
        narrow = gl.convert_layout(weights.to(gl.float16), TO_VALUES, assert_trivial=True)
        sums = mma_v2(narrow, gl.convert_layout(wide, VALUES, assert_trivial=True), sums)
        values = load_values(heads, pages, layer, PAGE_ROWS, ROW)
        peak, exponent, pages = new_peak, new_exponent, pages_after
        key_scales, value_scales = next_key_scales, next_value_scales
    return peak, total, sums * power_of_two(exponent)


@gluon.jit
def as_f16(words):
    """Convert the four i8 of each word to f16, exactly: [..] i32 -> [.., 2, 2]."""
    first, second, third, fourth = gl.inline_asm_elementwise(
        _TO_F16, "=h,=h,=h,=h,r", [words], dtype=(gl.float16,) * 4, is_pure=True, pack=1
    )
    return gl.join(gl.join(first, third), gl.join(second, fourth))


@gluon.jit
def exponent_above(x):
    """Return the exponent of a power of two above x, which must not be negative; from -126 to 126.

    Above 2^126, x is less than 4 times the power.
    """
    return gl.minimum(gl.maximum((x.to(gl.int32, bitcast=True) >> 23) - 126, -126), 126)


@gluon.jit
def power_of_two(exponent):
    """Return 2^exponent as f32, for exponents of up to 127; 0 below -126."""
    return (gl.maximum(exponent + 127, 0) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def load_pages(table, slot, end):
    """Load the numbers of the page of a slot, and of the next one; 0 for pages that start after `end`."""
    at = table + slot // PAGE
    return gl.load(at, mask=slot < end, other=0), gl.load(at + 1, mask=slot + PAGE < end, other=0)


@gluon.jit
def load_keys(heads, pages, layer, PAGE_ROWS: gl.constexpr, ROW: gl.constexpr):
    """Load the keys of two pages: [WORDS, 2, PAGE] i32."""
    first = key_offsets(pages, layer, gl.SliceLayout(0, gl.SliceLayout(2, KEY_WORDS)), PAGE_ROWS, ROW)
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(1, gl.SliceLayout(2, KEY_WORDS)))
    slot = gl.arange(0, PAGE, layout=gl.SliceLayout(0, gl.SliceLayout(1, KEY_WORDS)))
    offset = word[:, None, None] + (slot * (ROW // 4))[None, None, :]
    return gl.load(heads + first[None, :, None] + offset)


@gluon.jit
def load_values(heads, pages, layer, PAGE_ROWS: gl.constexpr, ROW: gl.constexpr):
    """Load the values of two pages: [2, PAGE, WORDS] i32."""
    first = key_offsets(pages, layer, gl.SliceLayout(1, gl.SliceLayout(2, VALUE_WORDS)), PAGE_ROWS, ROW)
    slot = gl.arange(0, PAGE, layout=gl.SliceLayout(0, gl.SliceLayout(2, VALUE_WORDS)))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, VALUE_WORDS)))
    offset = ((PAGE + slot) * (ROW // 4))[None, :, None] + word[None, None, :]
    return gl.load(heads + first[:, None, None] + offset)


@gluon.jit
def load_scales(scales, pages, at, end, layer, PAGE_ROWS: gl.constexpr, ROW: gl.constexpr):
    """Load the scales of two pages' keys and values, [STEP] f32 each; 0 from slot `end` on.

    `at` is the first page's first slot.
    """
    first = key_offsets(pages, layer, gl.SliceLayout(1, SCALES), PAGE_ROWS, ROW)
    slot = gl.arange(0, PAGE, layout=gl.SliceLayout(0, SCALES))
    page = gl.arange(0, 2, layout=gl.SliceLayout(1, SCALES))
    exists = at + page[:, None] * PAGE + slot[None, :] < end
    of_key = scales + first[:, None] + (slot * (ROW // 4))[None, :]
    key_scales = gl.load(of_key, mask=exists, other=0.0)
    value_scales = gl.load(of_key + PAGE * (ROW // 4), mask=exists, other=0.0)
    key_scales = gl.convert_layout(gl.reshape(key_scales, [STEP]), OF_COLUMNS, assert_trivial=True)
    return key_scales, gl.convert_layout(gl.reshape(value_scales, [STEP]), OF_COLUMNS, assert_trivial=True)


@gluon.jit
def key_offsets(pages, layer, LAYOUT: gl.constexpr, PAGE_ROWS: gl.constexpr, ROW: gl.constexpr):
    """Return the first word of the keys of each of two pages, relative to the cache's: [2] i64."""
    rows = gl.where(gl.arange(0, 2, layout=LAYOUT) == 0, pages[0], pages[1])
    return gl.multiple_of((rows * PAGE_ROWS + layer * 2 * PAGE) * (ROW // 4), 4)
