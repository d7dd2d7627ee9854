"""The arithmetic of sampling, which host and device follow bit for bit.

A weight is an unnormalised probability as an integer, 2**WEIGHT_BITS for the best token. Integers are used so
that sums do not depend on their order, and results are equal on all machines:

    exponent = max(LOWEST_EXPONENT, trunc((logit - best) * scale))              f32, then i32
    whole, fraction = exponent >> FRACTION_BITS, exponent & (2**FRACTION_BITS - 1)
    weight = polynomial(fraction) << (WEIGHT_BITS - POLYNOMIAL_BITS) >> -whole  i64

`scale` is 2**FRACTION_BITS * log2(e) / temperature. The polynomial approximates 2**(fraction /
2**FRACTION_BITS) within 3e-9, in units of 2**-POLYNOMIAL_BITS. It is evaluated by Horner's rule in i64, with
each product shifted right by FRACTION_BITS. It increases with the fraction and stays below 2, so weights have
the order of the logits.

`top_p` is a multiple of 2**-SHARE_BITS.

Log-probabilities are computed from the same weights, at temperature 1 and before adjustments, so that they
too are equal on all machines:

    mass = sum of the weights of all tokens, with UNIT_SCALE            i64
    logprob = logit - best - log(mass / 2**WEIGHT_BITS)                 f64

They are within 1e-6 of a log-softmax in f64, in nats.

A draw from some weights computes target = word * sum of the weights / 2**64, and selects the weight whose
interval contains the target when the weights are laid end to end. The word is the first of Philox 4x64 with
10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), for the key (seed, 0) and
the counter (index of the token in the output + 1, attempt, 0, 0).

With `top_k`, the best k logits, best first and ties by lower ID, are filtered by top-p and min-p. Attempt 0
draws from the tokens that pass, in this order.

Without `top_k`, a token is drawn from the full row, in order of token IDs, and accepted or drawn again, as in
FlashInfer's kernels. This needs sums over the row but no sorting, so that parts of the row can be searched in
parallel:

    pivot = max(min-p's least weight, 1) - 1
    attempt 0, 1, ...: draw from the weights above the pivot. Accept the token if the weights above its own
    weight sum to less than top_p times the sum of all weights, or to 0. Otherwise its weight is the next
    pivot.

A rejected token has a lower weight than every token that top-p keeps, so the kept tokens have the same
relative probabilities in the next attempt. Tokens as likely as the least likely one that top-p keeps are
kept, too.
"""

from __future__ import annotations

FRACTION_BITS = 22
WEIGHT_BITS = 44  # sums of 2**19 weights fit an i64
SHARE_BITS = 31
LOWEST_EXPONENT = -(63 << FRACTION_BITS)  # its weight is 0
UNIT_SCALE = 6051101.5  # the scale at temperature 1, as an f32

POLYNOMIAL_BITS = 38
POLYNOMIAL = (  # from the constant term up
    *(274877906944, 190530796874, 66033898305, 15250889573),
    *(2661167024, 341241988, 59912383),
)

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
PHILOX_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
