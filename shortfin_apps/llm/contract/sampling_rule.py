"""The arithmetic of sampling, which host and device follow bit for bit.

A weight is an unnormalised probability as an integer, 2**WEIGHT_BITS for the best token, so that sums do not
depend on their order and no rounding differs between two machines:

    exponent = max(LOWEST_EXPONENT, trunc((logit - best) * scale))              f32, then i32
    whole, fraction = exponent >> FRACTION_BITS, exponent & (2**FRACTION_BITS - 1)
    weight = polynomial(fraction) << (WEIGHT_BITS - POLYNOMIAL_BITS) >> -whole  i64

`scale` is 2**FRACTION_BITS * log2(e) / temperature. The polynomial, with Horner's rule in i64 and each
product shifted right by FRACTION_BITS, is 2**(fraction / 2**FRACTION_BITS) within 3e-9, in units of
2**-POLYNOMIAL_BITS. It grows with the fraction and stays below 2, so weights have the order of the logits.

`top_p` is a multiple of 2**-SHARE_BITS. A draw is the first word of Philox 4x64 with 10 rounds (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with the key (seed, 0) and the counter (index of
the token in the output + 1, attempt, 0, 0), times the sum of some weights, divided by 2**64. It selects the
weight that contains it when the weights are laid end to end.

With `top_k`, the best k logits, best first and ties by lower id, are filtered by top-p and min-p, and attempt
0 draws from the passing ones, in that order.

Without `top_k`, a token is drawn from the full row, in the order of ids, and accepted or drawn again, as in
FlashInfer's kernels. This needs sums over the row, but no sorting, so that its parts can be searched in
parallel:

    pivot = max(min-p's least weight, 1) - 1
    attempt 0, 1, ...: draw from the weights above the pivot; accept the token if the weights above its own
    sum to less than top-p's share of all, or to nothing; otherwise its weight is the next pivot

A rejected token has a lower weight than all tokens that top-p keeps, so these keep their relative
probabilities in the next attempt. Tokens as likely as the last one that top-p keeps are kept too.
"""

from __future__ import annotations

FRACTION_BITS = 22
WEIGHT_BITS = 44  # sums of 2**19 weights fit an i64
SHARE_BITS = 31
LOWEST_EXPONENT = -(63 << FRACTION_BITS)  # its weight is 0

POLYNOMIAL_BITS = 38
POLYNOMIAL = (  # from the constant term up
    *(274877906944, 190530796874, 66033898305, 15250889573),
    *(2661167024, 341241988, 59912383),
)

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
PHILOX_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
