"""The arithmetic of sampling, which the host and the device follow to the bit.

A weight is an unnormalised probability as an integer, 2**WEIGHT_BITS for the best token, so that sums do not
depend on their order and no rounding differs between two machines:

    exponent = max(LOWEST_EXPONENT, trunc((logit - best) * scale))              f32, then i32
    whole, fraction = exponent >> FRACTION_BITS, exponent & (2**FRACTION_BITS - 1)
    weight = polynomial(fraction) << (WEIGHT_BITS - POLYNOMIAL_BITS) >> -whole  i64

`scale` is 2**FRACTION_BITS * log2(e) / temperature. The polynomial, by Horner's rule in i64 with each product
shifted right by FRACTION_BITS, is 2**(fraction / 2**FRACTION_BITS) within 3e-9, in units of
2**-POLYNOMIAL_BITS; it grows with the fraction and stays below 2, so weights are ordered as logits are.

`top_p` is a multiple of 2**-SHARE_BITS. A draw is the first word of Philox 4x64 with 10 rounds (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) of the key (seed, 0) and the counter (index of
the token in the output + 1, attempt, 0, 0), times the sum of some weights, divided by 2**64: it falls into
one of them, laid end to end.

With `top_k` the best k logits, best first and of equals the lower id first, are filtered by top-p and min-p,
and attempt 0 draws from those that pass, in that order.

Without, a token is drawn from the whole row, in the order of ids, and kept or drawn again, as FlashInfer's
kernels do. This needs sums over the row, but no order of it, so that its parts can be searched at once:

    pivot = max(min-p's least weight, 1) - 1
    attempt 0, 1, ...: draw from the weights above the pivot; take the token if the weights above its own sum
    to less than top-p's share of all, or to nothing; else its weight is the next pivot

A token that is not taken has a weight below all that top-p keeps, so that these stay as likely, each to the
other, in the next attempt. Tokens as likely as the last that top-p keeps are kept too.
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
