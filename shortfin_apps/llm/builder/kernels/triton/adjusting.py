"""Adjust rows of logits, as `abi.py` specifies for an `adjusted_sample`.

Kernels here must be compiled without fused multiply-adds, as the host rounds products and sums.
"""

import triton
import triton.language as tl

from shortfin_apps.llm.contract import abi
from shortfin_apps.llm.contract.abi import EditField, PenaltyField

ROW, TOKEN_ID, BIAS, COUNT = (tl.constexpr(int(each)) for each in EditField)
REPETITION, FREQUENCY, PRESENCE = (tl.constexpr(int(each)) for each in PenaltyField)
WORD_BITS = tl.constexpr(32)
NOT_SEEN = tl.constexpr(abi.NOT_SEEN)
KEPT = tl.constexpr(abi.KEPT)


@triton.jit
def adjust_rows(
    logits, row_indices, allowed, allowed_indices, penalties, slots, resets, counts, adjusted, rows,
    SIZE: tl.constexpr, PART: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Copy the rows `row_indices` [rows] i64 of logits [any, SIZE] f32 to adjusted [rows, SIZE] f32.

    Row r of `adjusted` has the bitmask allowed_indices[r] i64 of allowed [any, WORDS] i32. Tokens with a 0
    bit become minus infinity. If the index is negative, all tokens are allowed. Tokens are penalised with
    the counts of slot slots[r] i64 in counts [any, SIZE] i32. If resets[r] i64 is not 0, these become
    NOT_SEEN instead. A row with a negative slot has none. `penalties` [fields, rows] f32 is by PenaltyField.
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = index < SIZE
    value = tl.load(logits + tl.load(row_indices + row) * SIZE + index, mask=inside, other=0.0)
    bitmask = tl.load(allowed_indices + row)
    if bitmask >= 0:
        word = tl.load(allowed + bitmask * WORDS + index // WORD_BITS, mask=inside, other=0)
        value = tl.where(is_set(word, index), value, float("-inf"))
    slot = tl.load(slots + row)
    if slot >= 0:
        at = counts + slot * SIZE + index
        if tl.load(resets + row) != 0:
            tl.store(at, tl.full((PART,), NOT_SEEN, tl.int32), mask=inside)
        else:
            repetition, frequency, presence = penalties_of(penalties + row, rows, slot >= 0)
            count = tl.load(at, mask=inside, other=NOT_SEEN)
            value = penalised(value, count, repetition, frequency, presence)
    tl.store(adjusted + row * SIZE + index, value, mask=inside)


@triton.jit
def edit_tokens(
    logits, row_indices, allowed, allowed_indices, penalties, slots, edits, counts, adjusted, rows, num_edits,
    SIZE: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply edits [fields, num_edits] i32 in place to adjusted [rows, SIZE] f32 and counts [any, SIZE] i32.

    The logits of the tokens are adjusted anew, with their biases and counts. EditField (abi.py) lists the
    fields; an edit of row -1 is padding. The other arguments are as in `adjust_rows`.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_edits
    edit = edits + place
    row = tl.load(edit + ROW * num_edits, mask=inside, other=-1).to(tl.int64)
    is_edit = row >= 0
    token_id = tl.load(edit + TOKEN_ID * num_edits, mask=is_edit, other=0)
    bias = tl.load(edit + BIAS * num_edits, mask=is_edit, other=0).to(tl.float32, bitcast=True)
    count = tl.load(edit + COUNT * num_edits, mask=is_edit, other=NOT_SEEN)

    slot = tl.load(slots + row, mask=is_edit, other=-1)
    has_slot = slot >= 0
    at = counts + slot * SIZE + token_id
    is_kept = count == KEPT
    count = tl.where(is_kept, tl.load(at, mask=has_slot & is_kept, other=NOT_SEEN), count)
    tl.store(at, count, mask=has_slot & (is_kept == 0))

    source = tl.load(row_indices + row, mask=is_edit, other=0)
    value = tl.load(logits + source * SIZE + token_id, mask=is_edit, other=0.0)
    bitmask = tl.load(allowed_indices + row, mask=is_edit, other=-1)
    word = tl.load(allowed + bitmask * WORDS + token_id // WORD_BITS, mask=bitmask >= 0, other=-1)
    value = tl.where(is_set(word, token_id), value, float("-inf")) + bias
    repetition, frequency, presence = penalties_of(penalties + row, rows, is_edit)
    value = penalised(value, count, repetition, frequency, presence)
    tl.store(adjusted + row * SIZE + token_id, value, mask=is_edit)


@triton.jit
def penalties_of(penalty, rows, is_row):
    """Return a row's penalties; `penalty` points at its column of [fields, rows] f32."""
    repetition = tl.load(penalty + REPETITION * rows, mask=is_row, other=1.0)
    frequency = tl.load(penalty + FREQUENCY * rows, mask=is_row, other=0.0)
    presence = tl.load(penalty + PRESENCE * rows, mask=is_row, other=0.0)
    return repetition, frequency, presence


@triton.jit
def penalised(value, count, repetition, frequency, presence):
    """Return the logits `value` f32 of tokens that were generated `count` i32 times, after the penalties."""
    changed = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    changed = changed - frequency * count.to(tl.float32)
    changed = changed - tl.where(count > 0, presence, 0.0)
    return tl.where(count >= 0, changed, value)


@triton.jit
def is_set(word, token_id):
    """Return whether a token's bit is set in `word`, which must contain this bit."""
    return ((word >> (token_id % WORD_BITS)) & 1) == 1
