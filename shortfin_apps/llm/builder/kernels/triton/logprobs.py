"""Terms of the log-probabilities of rows of logits, as `abi.py` specifies for a `logprobs` entry.

A row is divided into parts. One workgroup per part sums the weights of the part's tokens, and counts the
tokens that are more likely than the row's own. Then one workgroup per row adds these up.
"""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.sampling_arithmetic import weights_of
from shortfin_apps.llm.contract import sampling_rule
from shortfin_apps.llm.contract.abi import TermField

UNIT_SCALE = tl.constexpr(sampling_rule.UNIT_SCALE)
MASS, LOGIT, RANK = (tl.constexpr(int(each)) for each in TermField)


@triton.jit
def sum_parts(
    values, logits, row_indices, slots, last_tokens, sums,
    SIZE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write sums [rows, 2, PARTS] i64: for each part of a row, the sum of its weights, and a count.

    The count is of the part's logits above the logit of the row's token (`logit_of`). A part has PART tokens.
    Row r is row row_indices[r] of logits [any, SIZE] f32; values [any, K] f32 are the best of these rows.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    source = tl.load(row_indices + row)
    of_row = logits + source * SIZE
    index = part * PART + tl.arange(0, PART)
    value = tl.load(of_row + index, mask=index < SIZE, other=float("-inf"))
    scale = tl.full((), UNIT_SCALE, tl.float32).to(tl.int32, bitcast=True)
    weights = weights_of(value, tl.load(values + source * K), scale)
    is_greater = value > logit_of(of_row, slots + row, last_tokens, SIZE)
    of_parts = sums + row * 2 * PARTS + part
    tl.store(of_parts, tl.sum(weights, axis=0))
    tl.store(of_parts + PARTS, tl.sum(is_greater.to(tl.int64), axis=0))


@triton.jit
def write_terms(
    values, indices, logits, row_indices, slots, last_tokens, sums, terms, top_values, top_indices, rows,
    SIZE: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write terms [3, rows] i64, and the candidates top_values [rows, K] f32 and top_indices [rows, K] i64.

    `sums` [rows, 2, PARTS] i64 are the results of `sum_parts`; the other operands belong to its rows. BLOCK
    and PARTS_BLOCK are K and PARTS, rounded up to powers of two.
    """
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(row_indices + row)
    part = tl.arange(0, PARTS_BLOCK)
    of_parts = sums + row * 2 * PARTS + part
    mass = tl.sum(tl.load(of_parts, mask=part < PARTS, other=0), axis=0)
    num_greater = tl.sum(tl.load(of_parts + PARTS, mask=part < PARTS, other=0), axis=0)
    logit = logit_of(logits + source * SIZE, slots + row, last_tokens, SIZE)
    tl.store(terms + MASS * rows + row, mass)
    tl.store(terms + LOGIT * rows + row, logit.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(terms + RANK * rows + row, num_greater + 1)
    place = tl.arange(0, BLOCK)
    is_candidate = place < K
    value = tl.load(values + source * K + place, mask=is_candidate, other=0.0)
    tl.store(top_values + row * K + place, value, mask=is_candidate)
    index = tl.load(indices + source * K + place, mask=is_candidate, other=0)
    tl.store(top_indices + row * K + place, index, mask=is_candidate)


@triton.jit
def logit_of(of_row, slot_of_row, last_tokens, SIZE: tl.constexpr):
    """Return the logit of the token that the table has for a row, f32; undefined if it has none.

    `of_row` points at the row's logits [SIZE] f32, `slot_of_row` at its slot. The slot of a row that is not
    finite may still have another token, or none.
    """
    slot = tl.load(slot_of_row)
    token_id = tl.load(last_tokens + slot, mask=slot >= 0, other=0)
    return tl.load(of_row + token_id, mask=(token_id >= 0) & (token_id < SIZE), other=0.0)
