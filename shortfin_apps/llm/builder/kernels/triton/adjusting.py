"""Adjust rows of logits, as `abi.py` specifies for an `adjusted_sample`.

Kernels here must be compiled without fused multiply-adds, as the host rounds products and sums.
"""

import triton
import triton.language as tl

from shortfin_apps.llm.contract.abi import EditField, PenaltyField

ROW, TOKEN_ID, BIAS, COUNT = (tl.constexpr(int(each)) for each in EditField)
REPETITION, FREQUENCY, PRESENCE = (tl.constexpr(int(each)) for each in PenaltyField)
WORD_BITS = tl.constexpr(32)


@triton.jit
def allow_tokens(
    logits, row_indices, allowed, allowed_indices, adjusted,
    SIZE: tl.constexpr, PART: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Copy the rows `row_indices` [rows] i64 of logits [any, SIZE] f32 to adjusted [rows, SIZE] f32.

    Row r of `adjusted` has the bitmask allowed_indices[r] i64 of allowed [any, WORDS] i32. Tokens with a 0
    bit become minus infinity. If the index is negative, all tokens are allowed.
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = index < SIZE
    value = tl.load(logits + tl.load(row_indices + row) * SIZE + index, mask=inside, other=0.0)
    bitmask = tl.load(allowed_indices + row)
    if bitmask >= 0:
        word = tl.load(allowed + bitmask * WORDS + index // WORD_BITS, mask=inside, other=0)
        value = tl.where(((word >> (index % WORD_BITS)) & 1) == 1, value, float("-inf"))
    tl.store(adjusted + row * SIZE + index, value, mask=inside)


@triton.jit
def edit_tokens(edits, penalties, adjusted, rows, num_edits, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Apply edits [fields, num_edits] i32 in place to adjusted [rows, SIZE] f32.

    `penalties` [fields, rows] f32 are the rows' penalties. EditField and PenaltyField (abi.py) are the
    fields. An edit of row -1 is padding.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_edits
    edit = edits + place
    row = tl.load(edit + ROW * num_edits, mask=inside, other=-1)
    is_edit = row >= 0
    token_id = tl.load(edit + TOKEN_ID * num_edits, mask=is_edit, other=0)
    bias = tl.load(edit + BIAS * num_edits, mask=is_edit, other=0).to(tl.float32, bitcast=True)
    count = tl.load(edit + COUNT * num_edits, mask=is_edit, other=0)
    penalty = penalties + row
    repetition = tl.load(penalty + REPETITION * rows, mask=is_edit, other=1.0)
    frequency = tl.load(penalty + FREQUENCY * rows, mask=is_edit, other=0.0)
    presence = tl.load(penalty + PRESENCE * rows, mask=is_edit, other=0.0)
    at = adjusted + row.to(tl.int64) * SIZE + token_id
    value = tl.load(at, mask=is_edit, other=0.0) + bias
    penalised = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    penalised = penalised - frequency * count.to(tl.float32)
    penalised = penalised - tl.where(count > 0, presence, 0.0)
    tl.store(at, tl.where(count >= 0, penalised, value), mask=is_edit)
