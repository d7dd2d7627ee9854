"""The layers of a decode as one launch: workgroups stay resident, and wait for each other between stages.

The stages are the kernels that are otherwise separate launches (`embed`, `project_qkv`, `attend_singles`,
`linear`, `gated_linear`): the same functions compute the same tiles, and therefore the same bits. Each
workgroup computes every PROGRAMS-th tile of a stage, and arrives at the grid's barrier. Before it waits
there, it loads what no other workgroup writes. A layer has five stages:

    qkv            a tile of q, k and v; q to `q`, k and v to the cache
    attention      a share of the context of a row and a K/V head; the last share to finish combines all
    output         a tile of the output projection with the residual
    gate and up    a tile of the activated product
    down           a tile of the projection down with the residual

Norms are deferred to the next matmul as in the separate kernels (see __init__.py). In f16, where they are
not, a norm is one more stage before qkv and before gate and up. With weights in 8-bit floats, quantising its
input is one more stage before each matmul. Stages write over what earlier stages left:
between the last read and the next write of a buffer is at least one barrier.

The weights of a layer are found in the table `weights` [LAYERS + 1, NUM_FIELDS] i64 of addresses, which
`store_addresses` writes once, when the program is loaded. A matrix has three columns: itself, any scales
and, in blocks, any minima. The row after the last layer has the norm before the head, so that the norm after
a layer is always the first column of the next row, and in place of q, k and v the head.
"""

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from shortfin_apps.llm.builder.kernels.triton.attention import attend_share
from shortfin_apps.llm.builder.kernels.triton.fp8 import FP8_GROUP, quantise_tile
from shortfin_apps.llm.builder.kernels.triton.linear import gated_linear_tile, linear_tile
from shortfin_apps.llm.builder.kernels.triton.norm import embed_token, rms_norm_token
from shortfin_apps.llm.builder.kernels.triton.qkv import project_qkv_tile
from shortfin_apps.llm.builder.kernels.triton.synchronisation import (
    arrive,
    is_abandoned,
    memory_barrier,
    wait_for,
)

# Columns of the table of addresses; COLUMNS in lowering/triton/one_launch_kernels.py has the same. Those of
# matrices are followed by two more.
ATTENTION_NORM, BIAS, HEAD_NORM, SINKS, FFN_NORM = map(tl.constexpr, range(5))
QKV, OUTPUT, GATE_UP, DOWN = map(tl.constexpr, range(5, 17, 3))
NUM_FIELDS = tl.constexpr(17)
ALIGNMENT = tl.constexpr(16)  # bytes; of all weights and buffers
FLOATS = {
    "f32": tl.float32,
    "f16": tl.float16,
    "bf16": tl.bfloat16,
    "f8E4M3FN": tl.float8e4nv,
    "f8E4M3FNUZ": tl.float8e4b8,
}


@triton.jit
def store_addresses(w, scales, minima, table, at):
    """Store the addresses of a weight's parameters, except parameters that are None, in `table` [any] i64.

    `at`: index of the first of three elements.
    """
    store_address(table + at, w)
    store_address(table + at + 1, scales)
    store_address(table + at + 2, minima)


@triton.jit
def store_address(at, weight):
    if weight is not None:
        tl.store(at, weight.to(tl.int64))


@constexpr_function
def float_type(name):
    return FLOATS[name]


@triton.jit
def weight_at(table, layer, FIELD: tl.constexpr, TYPE: tl.constexpr, EXISTS: tl.constexpr = True):
    """Return the address of a layer's weight, which has elements of a type; None without one."""
    if EXISTS:
        address = tl.load(table + layer * NUM_FIELDS + FIELD)
        return tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGNMENT)
    else:
        return None


@triton.jit
def matrix_at(table, layer, FIELD: tl.constexpr, LAYOUT: tl.constexpr, TYPE: tl.constexpr):
    """Return the addresses of a layer's matrix, its scales and its minima; None for what it does not have.

    LAYOUT is None for floats of TYPE, and for 8-bit floats the name of their type. In blocks, it is the
    number of the matrix's parameters, before BLOCKS (see blocks.py).
    """
    if LAYOUT is None:
        return weight_at(table, layer, FIELD, TYPE), None, None
    elif in_8_bit_floats(LAYOUT):
        w = weight_at(table, layer, FIELD, float_type(LAYOUT))
        return w, weight_at(table, layer, FIELD + 1, tl.float32), None
    else:
        TERM: tl.constexpr = tl.int8 if LAYOUT[3] else tl.bfloat16 if LAYOUT[5] else tl.float16
        w = weight_at(table, layer, FIELD, tl.int8)
        scales = weight_at(table, layer, FIELD + 1, TERM)
        return w, scales, weight_at(table, layer, FIELD + 2, TERM, LAYOUT[0] > 2)


@constexpr_function
def blocks_of(layout):
    """Return BLOCKS of a matrix with this LAYOUT (see `matrix_at`)."""
    return None if layout is None or isinstance(layout, str) else layout[1:]


@constexpr_function
def in_8_bit_floats(layout):
    return isinstance(layout, str)


@triton.jit
def buffer_at(work, OFFSET: tl.constexpr, TYPE: tl.constexpr):
    """Return the address of the buffer of elements of a type, OFFSET bytes after `work`."""
    return tl.multiple_of((work + OFFSET).to(tl.pointer_type(TYPE)), ALIGNMENT)


@triton.jit
def after_stage(barrier, stage, PROGRAMS: tl.constexpr):
    """Wait until all workgroups have completed the `stage`-th stage; return the number of the next one."""
    wait_for(barrier, stage * PROGRAMS)
    return stage + 1


@triton.jit
def input_of(
    LAYOUT: tl.constexpr, x, work, barrier, stage,
    QUANTS: tl.constexpr, QUANT_SCALES: tl.constexpr, PROGRAMS: tl.constexpr, TOKENS: tl.constexpr,
    FEATURES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the operands of x [TOKENS, FEATURES] for a matmul with a matrix of LAYOUT.

    They are x and any scales. For 8-bit floats, x is quantised to buffers in `work`, which is one more stage.
    The third result is the number of the next stage. ROWS: TOKENS or more, a power of two.
    """
    if in_8_bit_floats(LAYOUT):
        quants = buffer_at(work, QUANTS, float_type(LAYOUT))
        scales = buffer_at(work, QUANT_SCALES, tl.float32)
        stage = after_stage(barrier, stage, PROGRAMS)
        for group in tl.range(tl.program_id(0), tl.cdiv(FEATURES, FP8_GROUP), PROGRAMS, num_stages=1):
            quantise_tile(0, group, x, quants, scales, TOKENS, FEATURES, ROWS)
        arrive(barrier)
        return quants, scales, stage
    else:
        return x, None, stage


@triton.jit
def decode_layers(
    ids, embedding, embedding_scales, embedding_minima, weights, rotary, slots, starts, seq_lens, blocks,
    cache, counters, barrier, logits, work, width,
    PROGRAMS: tl.constexpr, TOKENS: tl.constexpr, LAYERS: tl.constexpr, HIDDEN: tl.constexpr,
    VOCAB: tl.constexpr, FFN: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr,
    GROUP: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_HEAD_NORM: tl.constexpr,
    HAS_SINKS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr, STRIDE: tl.constexpr, PAGE_ROWS: tl.constexpr,
    ROW: tl.constexpr, QUERIES: tl.constexpr, SLOTS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    SHARES: tl.constexpr, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, FLOAT: tl.constexpr, EMBEDDING_BLOCKS: tl.constexpr, QKV_LAYOUT: tl.constexpr,
    OUTPUT_LAYOUT: tl.constexpr, GATE_UP_LAYOUT: tl.constexpr, DOWN_LAYOUT: tl.constexpr,
    HEAD_LAYOUT: tl.constexpr, QKV_TILE: tl.constexpr, OUTPUT_TILE: tl.constexpr, GATE_UP_TILE: tl.constexpr,
    DOWN_TILE: tl.constexpr, HEAD_TILE: tl.constexpr, DEFERS: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
    SCALED: tl.constexpr, SQUARES: tl.constexpr, Q: tl.constexpr, ATTENDED: tl.constexpr,
    GATED: tl.constexpr, PARTS: tl.constexpr, STATES: tl.constexpr, QUANTS: tl.constexpr,
    QUANT_SCALES: tl.constexpr,
):  # fmt: skip
    """Compute `logits` [TOKENS, VOCAB] f32 of the tokens `ids` [TOKENS] i64, one per batch row.

    `embedding` [VOCAB, HIDDEN] is as in `embed`; `rotary` and `slots` are as in `project_qkv`; `starts`,
    `seq_lens`, `blocks`, `cache` and `counters` as in `attend_singles`. `barrier` [1] i32 and `counters` must
    be zero before a launch. `work` i8 has the buffers between stages, each at the byte that the constant of
    its name says. FLOAT: the type of activations. DEFERS: norms are deferred. A matmul's tile is (columns,
    depth, rows, PARTS, STAGES), with at least TOKENS rows; LAYOUT is as in `matrix_at`. STAGES: attention's.
    If a wait takes too long, all logits are NaN.
    """
    Q_FEATURES: tl.constexpr = HEADS * HEAD_DIM
    TYPE: tl.constexpr = float_type(FLOAT)
    IN_BYTES: tl.constexpr = cache.dtype.element_ty == tl.int8
    # The residual stream before and after attention: no stage writes what it reads, as Triton may load twice.
    x = buffer_at(work, X, tl.float32)
    y = buffer_at(work, Y, tl.float32)
    scaled = buffer_at(work, SCALED, TYPE)
    squares = buffer_at(work, SQUARES, tl.float32) if DEFERS else None
    q = buffer_at(work, Q, TYPE if IN_BYTES else cache.dtype.element_ty)
    attended = buffer_at(work, ATTENDED, TYPE)
    gated = buffer_at(work, GATED, TYPE)
    parts = buffer_at(work, PARTS, tl.float32)
    states = buffer_at(work, STATES, tl.float32)
    first = tl.program_id(0)
    stage = 1

    first_norm = weight_at(weights, 0, ATTENTION_NORM, tl.float32, DEFERS)
    for token in tl.range(first, TOKENS, PROGRAMS, num_stages=1):
        embed_token(
            token, ids, embedding, embedding_scales, embedding_minima, first_norm, x, scaled, squares,
            VOCAB, SCALE, HIDDEN, BLOCK, GROUP, EMBEDDING_BLOCKS,
        )  # fmt: skip
    arrive(barrier)

    for layer in tl.range(0, LAYERS, num_stages=1):
        if not DEFERS:
            its_norm = weight_at(weights, layer, ATTENTION_NORM, tl.float32)
            stage = after_stage(barrier, stage, PROGRAMS)
            norm_tokens(its_norm, x, scaled, PROGRAMS, TOKENS, HIDDEN, BLOCK, EPS)
            arrive(barrier)

        w, scales, minima = matrix_at(weights, layer, QKV, QKV_LAYOUT, TYPE)
        bias = weight_at(weights, layer, BIAS, tl.float32, HAS_BIAS)
        head_norm = weight_at(weights, layer, HEAD_NORM, tl.float32, HAS_HEAD_NORM)
        columns = (HEADS + 2 * KV_HEADS) * HEAD_COLUMNS
        given, given_scales, stage = input_of(
            QKV_LAYOUT, scaled, work, barrier, stage,
            QUANTS, QUANT_SCALES, PROGRAMS, TOKENS, HIDDEN, QKV_TILE[2],
        )  # fmt: skip
        stage = after_stage(barrier, stage, PROGRAMS)
        for tile in tl.range(first, tl.cdiv(columns, QKV_TILE[0]), PROGRAMS, num_stages=1):
            project_qkv_tile(
                0, tile * (QKV_TILE[0] // 2),
                given, given_scales, squares, w, scales, minima, bias, head_norm, rotary, slots, cache, q,
                TOKENS, layer,
                HIDDEN, HEADS, KV_HEADS, HEAD_DIM, HEAD_COLUMNS, STRIDE, ROW, EPS, GROUP,
                blocks_of(QKV_LAYOUT), QKV_TILE[2], QKV_TILE[0], QKV_TILE[1], EARLY, QKV_TILE[3], QKV_TILE[4],
            )  # fmt: skip
        arrive(barrier)

        sinks = weight_at(weights, layer, SINKS, tl.float32, HAS_SINKS)
        splits = tl.minimum(tl.cdiv(width * STRIDE, SPLIT), MOST_SPLITS)
        stage = after_stage(barrier, stage, PROGRAMS)
        for item in tl.range(first, TOKENS * KV_HEADS * splits, PROGRAMS, num_stages=1):
            # The number of the share changes last, because only long contexts have the later shares.
            attend_share(
                item % TOKENS, item // TOKENS % KV_HEADS, item // (TOKENS * KV_HEADS),
                q, cache, None, starts, seq_lens, blocks, sinks, counters, attended, parts, states, TOKENS,
                TOKENS, width, layer,
                HEADS, KV_HEADS, HEAD_DIM, BLOCK_DIM, STRIDE, PAGE_ROWS, ROW, QUERIES, SLOTS, WINDOW, CAP,
                SHARES, SPLIT, MOST_SPLITS, None, None, STAGES,
            )  # fmt: skip
            memory_barrier()  # waves without queries of the item must not start the next one yet
        arrive(barrier)

        w, scales, minima = matrix_at(weights, layer, OUTPUT, OUTPUT_LAYOUT, TYPE)
        ffn_norm = weight_at(weights, layer, FFN_NORM, tl.float32, DEFERS)
        given, given_scales, stage = input_of(
            OUTPUT_LAYOUT, attended, work, barrier, stage,
            QUANTS, QUANT_SCALES, PROGRAMS, TOKENS, Q_FEATURES, OUTPUT_TILE[2],
        )  # fmt: skip
        stage = after_stage(barrier, stage, PROGRAMS)
        for tile in tl.range(first, tl.cdiv(HIDDEN, OUTPUT_TILE[0]), PROGRAMS, num_stages=1):
            linear_tile(
                0, tile * OUTPUT_TILE[0],
                given, given_scales, None, w, scales, minima, x, ffn_norm, y, scaled, squares, TOKENS,
                Q_FEATURES, HIDDEN, EPS, GROUP, blocks_of(OUTPUT_LAYOUT),
                OUTPUT_TILE[2], OUTPUT_TILE[0], OUTPUT_TILE[1], EARLY, OUTPUT_TILE[3], OUTPUT_TILE[4],
            )  # fmt: skip
        arrive(barrier)

        if not DEFERS:
            its_norm = weight_at(weights, layer, FFN_NORM, tl.float32)
            stage = after_stage(barrier, stage, PROGRAMS)
            norm_tokens(its_norm, y, scaled, PROGRAMS, TOKENS, HIDDEN, BLOCK, EPS)
            arrive(barrier)

        w, scales, minima = matrix_at(weights, layer, GATE_UP, GATE_UP_LAYOUT, TYPE)
        given, given_scales, stage = input_of(
            GATE_UP_LAYOUT, scaled, work, barrier, stage,
            QUANTS, QUANT_SCALES, PROGRAMS, TOKENS, HIDDEN, GATE_UP_TILE[2],
        )  # fmt: skip
        stage = after_stage(barrier, stage, PROGRAMS)
        for tile in tl.range(first, tl.cdiv(2 * FFN, GATE_UP_TILE[0]), PROGRAMS, num_stages=1):
            gated_linear_tile(
                0, tile * (GATE_UP_TILE[0] // 2),
                given, given_scales, squares, w, scales, minima, gated, TOKENS,
                HIDDEN, FFN, EPS, GROUP, blocks_of(GATE_UP_LAYOUT),
                GATE_UP_TILE[2], GATE_UP_TILE[0], GATE_UP_TILE[1], EARLY, GATE_UP_TILE[3], ACTIVATION,
                GATE_UP_TILE[4],
            )  # fmt: skip
        arrive(barrier)

        w, scales, minima = matrix_at(weights, layer, DOWN, DOWN_LAYOUT, TYPE)
        next_norm = weight_at(weights, layer + 1, ATTENTION_NORM, tl.float32, DEFERS)
        given, given_scales, stage = input_of(
            DOWN_LAYOUT, gated, work, barrier, stage,
            QUANTS, QUANT_SCALES, PROGRAMS, TOKENS, FFN, DOWN_TILE[2],
        )  # fmt: skip
        stage = after_stage(barrier, stage, PROGRAMS)
        for tile in tl.range(first, tl.cdiv(HIDDEN, DOWN_TILE[0]), PROGRAMS, num_stages=1):
            linear_tile(
                0, tile * DOWN_TILE[0],
                given, given_scales, None, w, scales, minima, y, next_norm, x, scaled, squares, TOKENS,
                FFN, HIDDEN, EPS, GROUP, blocks_of(DOWN_LAYOUT),
                DOWN_TILE[2], DOWN_TILE[0], DOWN_TILE[1], EARLY, DOWN_TILE[3], DOWN_TILE[4],
            )  # fmt: skip
        arrive(barrier)

    if not DEFERS:
        its_norm = weight_at(weights, LAYERS, ATTENTION_NORM, tl.float32)
        stage = after_stage(barrier, stage, PROGRAMS)
        norm_tokens(its_norm, x, scaled, PROGRAMS, TOKENS, HIDDEN, BLOCK, EPS)
        arrive(barrier)
    w, scales, minima = matrix_at(weights, LAYERS, QKV, HEAD_LAYOUT, TYPE)
    stage = after_stage(barrier, stage, PROGRAMS)
    for tile in tl.range(first, tl.cdiv(VOCAB, HEAD_TILE[0]), PROGRAMS, num_stages=1):
        linear_tile(
            0, tile * HEAD_TILE[0],
            scaled, None, squares, w, scales, minima, None, None, logits, None, None, TOKENS,
            HIDDEN, VOCAB, EPS, GROUP, blocks_of(HEAD_LAYOUT),
            HEAD_TILE[2], HEAD_TILE[0], HEAD_TILE[1], EARLY, HEAD_TILE[3], HEAD_TILE[4],
        )  # fmt: skip
    if is_abandoned(barrier):
        memory_barrier()  # no logits of another wave may follow
        for tile in tl.range(first, tl.cdiv(VOCAB, HEAD_TILE[0]), PROGRAMS, num_stages=1):
            store_nans(logits, tile * HEAD_TILE[0], TOKENS, VOCAB, HEAD_TILE[0])


@triton.jit
def store_nans(logits, first, TOKENS: tl.constexpr, VOCAB: tl.constexpr, COLUMNS: tl.constexpr):
    """Make NaN of COLUMNS logits from `first` on of every token, which the host reports as an error."""
    column = first + tl.arange(0, COLUMNS)
    for token in range(TOKENS):
        nans = tl.full((COLUMNS,), float("nan"), tl.float32)
        tl.store(logits + token * VOCAB + column, nans, mask=column < VOCAB)


@triton.jit
def norm_tokens(
    weight, x, y,
    PROGRAMS: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """Compute this workgroup's rows of `rms_norm`."""
    for token in tl.range(tl.program_id(0), TOKENS, PROGRAMS, num_stages=1):
        rms_norm_token(token.to(tl.int64), x, weight, y, FEATURES, BLOCK, EPS)
