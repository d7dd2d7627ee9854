"""The arithmetic and the constants of `sampling_rule.py`, in Triton."""

import triton
import triton.language as tl

from shortfin_apps.llm.contract import sampling_rule
from shortfin_apps.llm.contract.abi import NO_TOP_K, NOT_FINITE, SamplingField

FRACTION_BITS = tl.constexpr(sampling_rule.FRACTION_BITS)
LOWEST_EXPONENT = tl.constexpr(float(sampling_rule.LOWEST_EXPONENT))
HEADROOM = tl.constexpr(sampling_rule.WEIGHT_BITS - sampling_rule.POLYNOMIAL_BITS)
POLYNOMIAL = tl.constexpr(sampling_rule.POLYNOMIAL)
SHARE_BITS = tl.constexpr(sampling_rule.SHARE_BITS)
ROUNDS = tl.constexpr(sampling_rule.PHILOX_ROUNDS)
MULTIPLIER_0, MULTIPLIER_1 = map(tl.constexpr, sampling_rule.PHILOX_MULTIPLIERS)
WEYL_0, WEYL_1 = map(tl.constexpr, sampling_rule.PHILOX_WEYL)
LOW_HALF = tl.constexpr((1 << 32) - 1)
EXPONENT_BITS = tl.constexpr(0x7F800000)  # all set if an f32 is not finite
WHOLE_SHARE = tl.constexpr(1 << sampling_rule.SHARE_BITS)
SPOILED = tl.constexpr(NOT_FINITE)
WHOLE_ROW = tl.constexpr(NO_TOP_K)
SCALE, TOP_K, SHARE, LEAST_WEIGHT, SEED, PROMPT_LENGTH = (tl.constexpr(int(each)) for each in SamplingField)


@triton.jit
def weights_of(value, best, scale):
    """Return the i64 sampling weights of logits `value` f32.

    `best` is the row's largest logit; `scale` has the bits of an f32, as i64.
    """
    factor = scale.to(tl.int32).to(tl.float32, bitcast=True)
    exponent = tl.maximum((value - best) * factor, LOWEST_EXPONENT).to(tl.int32)
    fraction = (exponent & ((1 << FRACTION_BITS) - 1)).to(tl.int64)
    power = tl.full(fraction.shape, POLYNOMIAL[len(POLYNOMIAL) - 1], tl.int64)
    for i in tl.static_range(1, len(POLYNOMIAL)):
        power = ((power * fraction) >> FRACTION_BITS) + POLYNOMIAL[len(POLYNOMIAL) - 1 - i]
    return (power << HEADROOM) >> (-(exponent >> FRACTION_BITS)).to(tl.int64)


@triton.jit
def share_of(mass, share):
    """Return `mass` times `share`, rounded down; `share` is in units of 2**-SHARE_BITS."""
    low = mass & ((1 << SHARE_BITS) - 1)
    return (mass >> SHARE_BITS) * share + ((low * share) >> SHARE_BITS)


@triton.jit
def philox(seed, count, attempt):
    """Return the first u64 of Philox 4x64 with key (seed, 0) and counter (count, attempt, 0, 0).

    The arguments are i64.
    """
    zero = tl.full((), 0, tl.uint64)
    a, b, c, d = count.to(tl.uint64), attempt.to(tl.uint64), zero, zero
    key_0, key_1 = seed.to(tl.uint64), zero
    multiplier_0 = tl.full((), MULTIPLIER_0, tl.uint64)
    multiplier_1 = tl.full((), MULTIPLIER_1, tl.uint64)
    for _ in tl.range(ROUNDS):  # not unrolled, which would exceed the available registers
        next_a = high_product(multiplier_1, c) ^ b ^ key_0
        next_c = high_product(multiplier_0, a) ^ d ^ key_1
        b, d = multiplier_1 * c, multiplier_0 * a
        a, c = next_a, next_c
        key_0 += tl.full((), WEYL_0, tl.uint64)
        key_1 += tl.full((), WEYL_1, tl.uint64)
    return a


@triton.jit
def high_product(a, b):
    """Return the upper 64 bits of the product of two u64."""
    a_low, a_high = a & LOW_HALF, a >> 32
    b_low, b_high = b & LOW_HALF, b >> 32
    first = a_high * b_low + ((a_low * b_low) >> 32)
    second = a_low * b_high + (first & LOW_HALF)
    return a_high * b_high + (first >> 32) + (second >> 32)


@triton.jit
def is_finite(value):
    """Whether f32 `value` is neither infinite nor NaN."""
    return (value.to(tl.int32, bitcast=True) & EXPONENT_BITS) != EXPONENT_BITS


@triton.jit
def holder_of(target, weights, before):
    """Return which of `weights` i64 contains `target` i64: before <= target < before + weight.

    `before` is the sum of all earlier weights.
    """
    return (before <= target) & (target < before + weights)


@triton.jit
def pick(values, is_picked):
    """Return the element of `values` i64 for which `is_picked` is true; 0 if there is none."""
    return tl.sum(tl.where(is_picked, values, 0), axis=0)
