"""A token for each row of a decode loop, by the rule in `sampling_rule.py`, and the loop's next state."""

import triton
import triton.language as tl

from shortfin_apps.llm import sampling_rule
from shortfin_apps.llm.abi import NOT_FINITE, SamplingField

FRACTION_BITS = tl.constexpr(sampling_rule.FRACTION_BITS)
LOWEST_EXPONENT = tl.constexpr(float(sampling_rule.LOWEST_EXPONENT))
HEADROOM = tl.constexpr(sampling_rule.WEIGHT_BITS - sampling_rule.POLYNOMIAL_BITS)
POLYNOMIAL = tl.constexpr(sampling_rule.POLYNOMIAL)
SHARE_BITS = tl.constexpr(sampling_rule.SHARE_BITS)
ROUNDS = tl.constexpr(sampling_rule.PHILOX_ROUNDS)
MULTIPLIER_0, MULTIPLIER_1 = map(tl.constexpr, sampling_rule.PHILOX_MULTIPLIERS)
WEYL_0, WEYL_1 = map(tl.constexpr, sampling_rule.PHILOX_WEYL)
LOW_HALF = tl.constexpr((1 << 32) - 1)
EXPONENT_BITS = tl.constexpr(0x7F800000)  # all set in an f32 that is not finite
SPOILED = tl.constexpr(NOT_FINITE)
SCALE, TOP_K, SHARE, LEAST_WEIGHT, SEED, PROMPT_LENGTH = (tl.constexpr(int(each)) for each in SamplingField)


@triton.jit
def sample(
    values,
    indices,
    sampling,
    tokens,
    positions,
    token_ids,
    rows,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """token_ids [rows] i64, and the next of `tokens` and `positions` [rows] i64, written over them.

    Candidates are values [rows, K] f32, descending, and indices [rows, K] i64; `sampling` [6, rows] i64 is as
    in abi.py. A row whose best value is not finite gets SPOILED and keeps its token; a padding row keeps its
    state.
    """
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    is_candidate = place < K
    value = tl.load(values + row * K + place, mask=is_candidate, other=0.0)
    best = tl.load(values + row * K)
    field = sampling + row
    top_k = tl.load(field + TOP_K * rows)
    weights = weights_of(value, best, tl.load(field + SCALE * rows))
    weights = tl.where(is_candidate & (place < top_k), weights, 0)
    before = tl.cumsum(weights, axis=0) - weights

    within = share_of(tl.sum(weights, axis=0), tl.load(field + SHARE * rows))
    passes = (before < within) & (weights >= tl.load(field + LEAST_WEIGHT * rows))
    kept = tl.where(passes | (place == 0), weights, 0)
    position = tl.load(positions + row)
    count = position - tl.load(field + PROMPT_LENGTH * rows) + 2
    word = philox(tl.load(field + SEED * rows), count)
    target = high_product(word, tl.sum(kept, axis=0).to(tl.uint64)).to(tl.int64)

    index = tl.load(indices + row * K + place, mask=is_candidate, other=0)
    is_drawn = (before <= target) & (target < before + kept)
    drawn = tl.sum(tl.where(is_drawn, index - SPOILED, 0), axis=0) + SPOILED
    is_finite = (best.to(tl.int32, bitcast=True) & EXPONENT_BITS) != EXPONENT_BITS
    token_id = tl.where(is_finite, drawn, SPOILED)
    tl.store(token_ids + row, token_id)
    is_padding = position < 0
    tl.store(tokens + row, token_id, mask=(token_id >= 0) & (position >= 0))
    tl.store(positions + row, tl.where(is_padding, position, position + 1))


@triton.jit
def weights_of(value, best, scale):
    """i64 weights of logits `value` f32, given the row's `best` and its `scale`, an f32's bits as i64."""
    factor = scale.to(tl.int32).to(tl.float32, bitcast=True)
    exponent = tl.maximum((value - best) * factor, LOWEST_EXPONENT).to(tl.int32)
    fraction = (exponent & ((1 << FRACTION_BITS) - 1)).to(tl.int64)
    power = tl.full(fraction.shape, POLYNOMIAL[len(POLYNOMIAL) - 1], tl.int64)
    for i in tl.static_range(1, len(POLYNOMIAL)):
        power = ((power * fraction) >> FRACTION_BITS) + POLYNOMIAL[len(POLYNOMIAL) - 1 - i]
    return (power << HEADROOM) >> (-(exponent >> FRACTION_BITS)).to(tl.int64)


@triton.jit
def share_of(mass, share):
    """`mass` times `share` in units of 2**-SHARE_BITS, rounded down."""
    low = mass & ((1 << SHARE_BITS) - 1)
    return (mass >> SHARE_BITS) * share + ((low * share) >> SHARE_BITS)


@triton.jit
def philox(seed, count):
    """The first u64 of Philox 4x64 of the key (seed, 0) and the counter (count, 0, 0, 0), both i64."""
    zero = tl.full((), 0, tl.uint64)
    a, b, c, d = count.to(tl.uint64), zero, zero, zero
    key_0, key_1 = seed.to(tl.uint64), zero
    multiplier_0 = tl.full((), MULTIPLIER_0, tl.uint64)
    multiplier_1 = tl.full((), MULTIPLIER_1, tl.uint64)
    for _ in tl.static_range(ROUNDS):
        next_a = high_product(multiplier_1, c) ^ b ^ key_0
        next_c = high_product(multiplier_0, a) ^ d ^ key_1
        b, d = multiplier_1 * c, multiplier_0 * a
        a, c = next_a, next_c
        key_0 += tl.full((), WEYL_0, tl.uint64)
        key_1 += tl.full((), WEYL_1, tl.uint64)
    return a


@triton.jit
def high_product(a, b):
    """The upper 64 bits of the product of two u64."""
    a_low, a_high = a & LOW_HALF, a >> 32
    b_low, b_high = b & LOW_HALF, b >> 32
    first = a_high * b_low + ((a_low * b_low) >> 32)
    second = a_low * b_high + (first & LOW_HALF)
    return a_high * b_high + (first >> 32) + (second >> 32)
